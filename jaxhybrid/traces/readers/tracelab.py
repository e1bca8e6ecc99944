"""Token counts of coding-agent rounds, without text or hashes (TraceLab's `round_trace.jsonl`).

JSON lines, one model call each:
  {"session_id": "...", "round_index": 0, "input_tokens_total": prompt tokens, "prefix_tokens": of them read from cache,
   "output_tokens": response tokens, "timing_events"?: [{"timestamp": ISO 8601}, ...]}
The calls of one session, in order of `round_index`, make one trajectory. A prompt shares its first `prefix_tokens`
with the context before it (the previous prompt and its response), and the rest is new. So a miss of the provider's
cache reads as an edited context: the counts cannot tell the two apart.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record, read_entries
from jaxhybrid.traces.readers.weka import block_call, check_lengths
from jaxhybrid.traces.trajectory import BlockCall, Trajectory

FORMAT = "tracelab"


class _Event(msgspec.Struct):
    timestamp: str | None = None


class _Round(msgspec.Struct):
    session_id: str
    round_index: int
    input_tokens_total: int
    prefix_tokens: int
    output_tokens: int
    timing_events: list[_Event] = []


class _Timed(NamedTuple):
    row: _Round
    source: str
    seconds: float | None


def recognises(value: Any) -> bool:
    return isinstance(value, dict) and {"input_tokens_total", "prefix_tokens", "round_index"} <= value.keys()


def read(records: Iterable[Record]) -> Iterator[Trajectory | TraceError]:
    sessions: dict[str, list[_Timed]] = {}
    for record in read_entries(records):
        try:
            row = record.convert(_Round)
            check_lengths(row.input_tokens_total, row.output_tokens, record.source)
            if not 0 <= row.prefix_tokens <= row.input_tokens_total:
                raise TraceError(
                    f"{record.source}: expected prefix_tokens within {row.input_tokens_total} input tokens, "
                    f"got {row.prefix_tokens}"
                )
            seconds = _seconds(row, record.source)
            sessions.setdefault(row.session_id, []).append(_Timed(row, record.source, seconds))
        except TraceError as error:
            yield error
    for session, rows in sessions.items():
        rows.sort(key=lambda timed: timed.row.round_index)
        yield Trajectory(session, rows[0].source, FORMAT, _calls(rows), f"tracelab/{session}")


def _calls(rows: list[_Timed]) -> tuple[BlockCall, ...]:
    """Calls in blocks of one token: every token ever new to the session gets the next number as its name."""
    calls: list[BlockCall] = []
    context = np.empty(0, dtype=np.int64)
    named = 0
    for index, timed in enumerate(rows):
        row = timed.row
        shared = context[: row.prefix_tokens]
        new = row.input_tokens_total - len(shared)
        prompt = np.concatenate([shared, np.arange(named, named + new)])
        named += new
        call = block_call(prompt.tolist(), 1, len(prompt), row.output_tokens, timed.source, timestamp_s=timed.seconds)
        calls.append(replace(call, parent=index - 1 if len(shared) else None))
        context = np.concatenate([prompt, np.arange(named, named + row.output_tokens)])
        named += row.output_tokens
    return tuple(calls)


def _seconds(row: _Round, source: str) -> float | None:
    stamp = next((event.timestamp for event in row.timing_events if event.timestamp), None)
    if stamp is None:
        return None
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        raise TraceError(f"{source}: expected an ISO 8601 timestamp, got {stamp!r}") from None
