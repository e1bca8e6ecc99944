"""Token counts of coding-agent rounds, without text or hashes (TraceLab's `round_trace.jsonl`).

JSON lines, one model call each:
  {"session_id": "...", "round_index": 0, "input_tokens_total": prompt tokens, "prefix_tokens": of them read from cache,
   "output_tokens": response tokens, "timing_events"?: [{"timestamp": ISO 8601}, ...]}
The calls of one session, in order of `round_index`, make one trajectory.

`prefix_tokens` is what the provider's cache hit, which is less than what the prompt shares with the context before it
(an earlier prompt and its response): hits end at a cache breakpoint or at a whole block of 128 tokens, seldom hold the
last response, and now and then a cache just misses. So lengths decide. A prompt that has room for the whole context
before it goes on from all of it, however little was hit. A shorter one dropped something: it shares what was hit, up
to the end of an earlier prompt if one ended within a block after that, since what is dropped is mostly from responses
(their reasoning). The context before it is the latest that is no shorter than the hit, else the latest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int64

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record, read_entries
from jaxhybrid.traces.readers.weka import block_call, check_lengths
from jaxhybrid.traces.trajectory import BlockCall, Trajectory

FORMAT = "tracelab"
CACHE_BLOCK = 128  # tokens; the coarsest unit in which a provider of these traces counts a hit


class _Event(msgspec.Struct):
    timestamp: str | None = None


class _Round(msgspec.Struct):
    session_id: str
    round_index: int
    input_tokens_total: int
    prefix_tokens: int | None
    output_tokens: int | None
    timing_events: list[_Event] | None = None


class _Timed(NamedTuple):
    row: _Round
    source: str
    seconds: float | None


@dataclass(frozen=True, eq=False)
class _Context:
    """A call's prompt and response as token names, how long the prompt is, and where those before it ended in it."""

    tokens: Int64[np.ndarray, " n"]
    prompt_ends: tuple[int, ...]


def recognises(value: Any) -> bool:
    return isinstance(value, dict) and {"input_tokens_total", "prefix_tokens", "round_index"} <= value.keys()


def read(records: Iterable[Record]) -> Iterator[Trajectory | TraceError]:
    sessions: dict[str, list[_Timed]] = {}
    for record in read_entries(records):
        try:
            row = record.convert(_Round)
            check_lengths(row.input_tokens_total, row.output_tokens or 0, record.source)
            if not 0 <= (row.prefix_tokens or 0) <= row.input_tokens_total:
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
    contexts: list[_Context] = []
    named = 0
    for timed in rows:
        row = timed.row
        length, response = row.input_tokens_total, row.output_tokens or 0
        parent, shared = _continued(contexts, length, row.prefix_tokens or 0)
        before = contexts[parent] if parent is not None else _Context(np.empty(0, np.int64), ())
        prompt = np.concatenate([before.tokens[:shared], np.arange(named, named + length - shared)])
        named += length - shared
        call = block_call(prompt.tolist(), 1, length, response, timed.source, timestamp_s=timed.seconds)
        calls.append(replace(call, parent=parent))
        ends = tuple(end for end in before.prompt_ends if end <= shared)
        tokens = np.concatenate([prompt, np.arange(named, named + response)])
        contexts.append(_Context(tokens, (*ends, length)))
        named += response
    return tuple(calls)


def _continued(contexts: list[_Context], length: int, hit: int) -> tuple[int | None, int]:
    """The call that a prompt of `length` tokens goes on from, and how many it shares with it: (None, 0) if none."""
    if not contexts:
        return None, 0
    latest = len(contexts) - 1
    parent = next((n for n in range(latest, -1, -1) if contexts[n].tokens.size >= hit), latest)
    before = contexts[parent]
    if before.tokens.size <= length:
        return parent, before.tokens.size
    dropped_after = [end for end in before.prompt_ends if hit <= end < min(hit + CACHE_BLOCK, length)]
    shared = max([hit, *dropped_after]) if hit else 0
    return (parent, shared) if shared else (None, 0)


def _seconds(row: _Round, source: str) -> float | None:
    stamp = next((event.timestamp for event in row.timing_events or () if event.timestamp), None)
    if stamp is None:
        return None
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        raise TraceError(f"{source}: expected an ISO 8601 timestamp, got {stamp!r}") from None
