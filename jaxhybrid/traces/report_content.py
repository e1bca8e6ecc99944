"""What a report says, in words and cells, whatever it is shown on: the headline, key numbers and tables of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxhybrid.traces import units
from jaxhybrid.traces.record import CallRecord, RunRecord
from jaxhybrid.traces.simulate import PolicyResult
from jaxhybrid.traces.summary import LIMITS, Limit, Totals, by_trajectory, response_end_pair, total

MAX_ROWS = 200


@dataclass(frozen=True)
class Tile:
    """A key number, what it is, and one line of context."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """Cells are text: words in the first `text_columns`, numbers after. `total_rows` counts the rows not shown too."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    total_rows: int = 0


def headline(record: RunRecord, totals: Totals) -> str:
    """The run in one sentence."""
    if not record.calls:
        return f"Policy study of {units.plural(len(record.policies), 'policy')}, no call replayed"
    trajectories = len({call.trajectory for call in record.calls})
    return (
        f"{units.plural(totals.calls, 'call')} of {units.plural(trajectories, 'trajectory')} through “{record.model}”: "
        f"{units.share(totals.hit_rate)} of prompt tokens reused"
    )


def key_tiles(record: RunRecord, totals: Totals) -> tuple[Tile, ...]:
    """The key numbers. What the run did not measure is left out."""
    counters = record.counters
    tiles: list[Tile] = []
    if record.calls:
        tiles += [
            Tile("Calls", units.count(totals.calls), f"{units.plural(totals.branches, 'branch')}, {record.mode} mode"),
            Tile(
                "Prompt tokens",
                units.compact(totals.prompt),
                f"longest context {units.compact(totals.longest_context)}",
            ),
            Tile("Reused", units.share(totals.hit_rate), f"{units.compact(totals.resumed)} tokens resumed"),
            Tile("Recomputation gap", units.compact(totals.gap), f"tokens, {units.count(totals.gap_per_call)} a call"),
            Tile(
                "Prefill amplification",
                units.factor(totals.amplification),
                "computed ÷ growth of context, 1 is perfect",
            ),
        ]
    if totals.warm_ttft_s is not None:
        cold = f"{units.seconds(totals.cold_ttft_s)} from nothing" if totals.cold_ttft_s is not None else "no cold call"
        tiles.append(Tile("Median TTFT, resumed", units.seconds(totals.warm_ttft_s), cold))
    if totals.decode_s > 0:
        rate = totals.generated / totals.decode_s
        tiles.append(
            Tile("Decode", f"{units.compact(rate)} tok/s", f"{units.compact(totals.generated)} tokens, per sequence")
        )
    if totals.log_likelihood is not None and totals.scored:
        nats = -totals.log_likelihood / totals.scored
        tiles.append(Tile("Response loss", f"{nats:.3f}", f"nats a token over {units.compact(totals.scored)} tokens"))
    for name, label in (("recurrent_bytes_copied", "Recurrent bytes copied"), ("kv_bytes_copied", "KV bytes copied")):
        if name in counters:
            tiles.append(Tile(label, units.byte_size(counters[name]), "for forks, checkpoints and restores"))
    if "compiled_programs" in counters:
        tiles.append(Tile("Compiled programs", units.count(counters["compiled_programs"]), "shapes are bucketed"))
    return tuple(tiles)


def policy_table(results: Sequence[PolicyResult]) -> Table:
    header = (
        "policy",
        "computed",
        "gap",
        "gap a call",
        "amplification",
        "beyond perfect",
        "hit rate",
        "peak checkpoints",
    )
    rows = [
        (
            each.policy,
            units.count(each.computed_tokens),
            units.count(each.gap_tokens),
            units.count(each.gap_tokens / max(1, each.calls)),
            units.factor(each.amplification),
            units.share(each.extra_prefill),
            units.share(each.hit_rate),
            units.count(each.peak_checkpoints),
        )
        for each in results
    ]
    return Table(header, tuple(rows), total_rows=len(rows))


def trajectory_table(calls: Sequence[CallRecord], limit: int = MAX_ROWS) -> Table:
    """One row a trajectory, most prompt tokens first."""
    header = (
        *("trajectory", "calls", "branches", "prompt", "reused", "gap", "new", "generated", "amplification"),
        *("median TTFT, resumed", "decode tok/s"),
    )
    rows = sorted((total(name, group) for name, group in by_trajectory(calls).items()), key=lambda row: -row.prompt)
    cells = [
        (
            row.name,
            units.count(row.calls),
            units.count(row.branches),
            units.count(row.prompt),
            units.share(row.hit_rate),
            units.count(row.gap),
            units.count(row.new),
            units.count(row.generated),
            units.factor(row.amplification),
            units.seconds(row.warm_ttft_s) if row.warm_ttft_s is not None else "–",
            units.compact(row.generated / row.decode_s) if row.decode_s > 0 else "–",
        )
        for row in rows[:limit]
    ]
    return Table(header, tuple(cells), total_rows=len(rows))


def limit_table(rows: Sequence[Limit]) -> Table:
    """What limited reuse, with the first prompt that left the known path."""
    header = ("limited by", "meaning", "first difference", "calls", "gap", "new")
    cells = [
        (
            row.limited_by.replace("_", " "),
            LIMITS.get(row.limited_by, "–"),
            differing(row.example),
            units.count(row.calls),
            units.count(row.gap),
            units.count(row.new),
        )
        for row in rows
    ]
    return Table(header, tuple(cells), text_columns=3, total_rows=len(rows))


def counter_table(counters: dict[str, int | float]) -> Table:
    rows = tuple(
        (name.replace("_", " "), units.byte_size(value) if "bytes" in name else units.count(value))
        for name, value in sorted(counters.items())
    )
    return Table(("counter", "value"), rows, total_rows=len(rows))


def differing(call: CallRecord | None) -> str:
    """Where a prompt left the path its trajectory had made, in words."""
    if call is None or call.differing is None:
        return "–"
    position, expected, came = call.differing
    where = f"{units.shorten(call.trajectory, 40)}, call {call.call + 1}"
    return f"{where}: at token {position:,} expected {expected}, got {came}"


def pair_tiles(results: Sequence[PolicyResult]) -> tuple[tuple[Tile, ...], tuple[Tile, ...]] | None:
    """Without and with response-end checkpoints, the same three numbers each."""
    pair = response_end_pair(results)
    return None if pair is None else (_policy_tiles(pair[0]), _policy_tiles(pair[1]))


def _policy_tiles(result: PolicyResult) -> tuple[Tile, ...]:
    return (
        Tile(
            "Gap",
            units.count(result.gap_tokens),
            f"tokens, {units.count(result.gap_tokens / max(1, result.calls))} a call",
        ),
        Tile("Amplification", units.factor(result.amplification), f"{units.compact(result.computed_tokens)} computed"),
        Tile("Beyond perfect", units.share(result.extra_prefill), "more prefill than a token-level cache"),
    )
