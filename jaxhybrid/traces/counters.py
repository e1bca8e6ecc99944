"""An engine's counters as one flat table, and those of the processes that a resumed run took added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxhybrid.engine.stats import EngineStats

_AS_OF_NOW = (
    "compiled_programs", "retained_checkpoints", "live_sequences", "live_slots", "free_slots", "live_pages",
    "free_pages",
)  # fmt: skip
_COPIES = ("recurrent_bytes_copied", "kv_bytes_copied", "state_moves")
_EVENTS = (
    "restores", "forks", "evictions", "preemptions", "refusals", "prefill_dispatches", "decode_dispatches",
)  # fmt: skip

Counters = dict[str, int | float]


def flat_counters(stats: EngineStats) -> Counters:
    """An engine's counters by name."""
    counters: Counters = {"calls": stats.tokens.calls}
    counters |= {
        f"{name}_tokens": getattr(stats.tokens, name) for name in ("prompt", "reused", "gap", "new", "generated")
    }
    counters |= {name: getattr(stats, name) for name in (*_AS_OF_NOW, *_COPIES)}
    counters |= {name: getattr(stats.events, name) for name in _EVENTS}
    counters |= {f"checkpoints_{kind}": count for kind, count in stats.events.checkpoints.items()}
    return counters | {f"kernel_fallbacks_{name}": count for name, count in stats.kernel_fallbacks.items()}


def add_up(processes: Iterable[Mapping[str, int | float]]) -> Counters:
    """The counters of a run from its processes', first to last: sums, but for what holds as of now."""
    total: Counters = {}
    for counters in processes:
        for name, value in counters.items():
            total[name] = value if name in _AS_OF_NOW else total.get(name, 0) + value
    return total
