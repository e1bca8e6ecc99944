"""What a run record says in a few numbers: the totals, by trajectory, and what limited reuse."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxhybrid.traces.record import CallRecord, RunRecord
from jaxhybrid.traces.simulate import PolicyResult, call_growth

LIMITS = {
    "none": "all that was known was reused",
    "cold": "nothing was known yet",
    "recurrent": "the recurrent state was not kept at the matched boundary",
    "pages": "the pages were not kept up to the matched boundary",
    "template": "the chat template rendered an earlier response otherwise than it was generated",
    "replaced": "the recorded response stands where the model had answered, as it does in generate mode",
    "context_edit": "an earlier message was changed",
}
"""What each value of `limited_by` means."""


@dataclass(frozen=True)
class Totals:
    """Sums over calls, in tokens; medians of the time to first token, in seconds, None without such a call.

    `growth` is what the calls added to their contexts; see `call_growth`.
    """

    name: str
    calls: int
    branches: int
    prompt: int
    resumed: int
    gap: int
    new: int
    generated: int
    growth: int
    longest_context: int
    warm_ttft_s: float | None
    cold_ttft_s: float | None
    decode_s: float
    log_likelihood: float | None
    scored: int
    """Tokens that `log_likelihood` is over."""

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens resumed from a bundle."""
        return self.resumed / self.prompt if self.prompt else 0.0

    @property
    def computed(self) -> int:
        """Tokens that went through the model, prompt and response."""
        return self.gap + self.new + self.generated

    @property
    def amplification(self) -> float:
        """Computed tokens over growth of the context: never below 1, which is perfect."""
        return self.computed / self.growth if self.growth else 1.0

    @property
    def gap_per_call(self) -> float:
        return self.gap / self.calls if self.calls else 0.0


@dataclass(frozen=True)
class Limit:
    """Calls whose reuse the same component limited; `example` is the first that shows where the prompt differed."""

    limited_by: str
    calls: int
    gap: int
    new: int
    example: CallRecord | None


def by_trajectory(calls: Iterable[CallRecord]) -> dict[str, tuple[CallRecord, ...]]:
    """Calls in order within each trajectory, trajectories in order of first appearance."""
    groups: dict[str, list[CallRecord]] = defaultdict(list)
    for call in calls:
        groups[call.trajectory].append(call)
    return {name: tuple(sorted(group, key=lambda call: call.call)) for name, group in groups.items()}


def total(name: str, calls: Sequence[CallRecord]) -> Totals:
    """Sums `calls`, which may span trajectories."""
    scored = [call for call in calls if call.log_likelihood is not None]
    return Totals(
        name=name,
        calls=len(calls),
        branches=len({(call.trajectory, call.branch) for call in calls}),
        prompt=sum(call.prompt_tokens for call in calls),
        resumed=sum(call.resumed for call in calls),
        gap=sum(call.gap for call in calls),
        new=sum(call.new_tokens for call in calls),
        generated=sum(call.generated for call in calls),
        growth=_growth(calls),
        longest_context=max((call.context_tokens for call in calls), default=0),
        warm_ttft_s=median([call.ttft_s for call in calls if call.resumed]),
        cold_ttft_s=median([call.ttft_s for call in calls if not call.resumed]),
        decode_s=sum(call.decode_s for call in calls),
        log_likelihood=sum(call.log_likelihood or 0.0 for call in scored) if scored else None,
        scored=sum(call.generated for call in scored),
    )


def limits(calls: Iterable[CallRecord]) -> list[Limit]:
    """What limited reuse, most calls first."""
    groups: dict[str, list[CallRecord]] = defaultdict(list)
    for call in calls:
        groups[call.limited_by].append(call)
    rows = [
        Limit(
            limited_by=name,
            calls=len(group),
            gap=sum(call.gap for call in group),
            new=sum(call.new_tokens for call in group),
            example=next((call for call in group if call.differing), None),
        )
        for name, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.calls)


def response_end_pair(policies: Sequence[PolicyResult]) -> tuple[PolicyResult, PolicyResult] | None:
    """The policies (without, with) response-end checkpoints that otherwise agree, or None where the study lacks one."""
    without = next((each for each in policies if plain_name(each.policy) == "prompt end"), None)
    having = next((each for each in policies if plain_name(each.policy).endswith("response end")), None)
    return (without, having) if without and having else None


def plain_name(policy: str) -> str:
    """'prompt_end' -> 'prompt end'."""
    return policy.replace("_", " ").replace("-", " ").strip().lower()


def key_numbers(record: RunRecord) -> Totals:
    """The totals of the whole run."""
    return total("all", record.calls)


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _growth(calls: Sequence[CallRecord]) -> int:
    contexts = {(call.trajectory, call.call): call.context_tokens for call in calls}
    growth = 0
    for call in calls:
        before = contexts.get((call.trajectory, call.parent)) if call.parent is not None else None
        growth += call_growth(call.context_tokens, before, call.new_tokens + call.generated)
    return growth
