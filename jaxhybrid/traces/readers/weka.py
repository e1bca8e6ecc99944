"""Coding-agent sessions as block hashes, without text (the Weka traces of kv-cache-tester).

  {"id": "...", "block_size": 64, "hash_id_scope"?: "local",
   "requests": [{"t": seconds, "type": "n" | "s", "in": prompt tokens, "out": response tokens, "hash_ids": [int, ...]},
                {"type": "subagent", "agent_id": "...", "t": seconds, "duration_ms": ms, "requests": [...]}, ...]}

`hash_ids` name the full blocks of the prompt: floor(in / block_size) of them. A sub-agent's requests have times from
its own start, and its own entry is written when it ends: it started at t - duration_ms. Calls are put in order of time,
so sub-agents that ran side by side interleave; a request without a time keeps its place after the one before it.
Sub-agents are branches named by `agent_id` (nested ones joined by "/"). Hashes are compared within the session, or
across all files where `hash_id_scope` is "global". What is null or left out counts as nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record, read_entries
from jaxhybrid.traces.lineage import with_parents
from jaxhybrid.traces.trajectory import BlockCall, Trajectory

FORMAT = "weka"
MAX_TOKENS = 2**24
"""No context is longer; a larger count is a broken record, and must not become an array."""


HashId = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Request(msgspec.Struct):
    type: str
    t: float | None = None
    input_length: int | None = msgspec.field(default=None, name="in")
    output_length: int | None = msgspec.field(default=None, name="out")
    hash_ids: list[HashId] | None = None
    agent_id: str | None = None
    duration_ms: float | None = None
    requests: list["_Request"] | None = None


class _Session(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_Request]
    hash_id_scope: str | None = None


def recognises(value: Any) -> bool:
    return isinstance(value, dict) and {"block_size", "requests"} <= value.keys()


def read(records: Iterable[Record]) -> Iterator[Trajectory | TraceError]:
    for record in read_entries(records):
        try:
            session = record.convert(_Session)
            calls = sorted(
                _calls(session.requests, session.block_size, "main", 0.0, record.source),
                key=lambda call: call.timestamp_s or 0.0,
            )
            if not calls:
                raise TraceError(f"{record.source}: expected at least one request, got none")
        except TraceError as error:
            yield error
        else:
            scope = "weka" if session.hash_id_scope == "global" else f"weka/{session.id}"
            yield Trajectory(session.id, record.source, FORMAT, with_parents(calls), scope)


def _calls(
    requests: Sequence[_Request], block_size: int, branch: str, start_s: float, source: str
) -> Iterator[BlockCall]:
    time_s = 0.0
    for number, request in enumerate(requests):
        place = f"{source}: {branch} request {number}"
        time_s = time_s if request.t is None else request.t
        if request.requests is not None:
            agent = request.agent_id or "subagent"
            name = agent if branch == "main" else f"{branch}/{agent}"
            began_s = start_s + time_s - (request.duration_ms or 0.0) / 1e3
            yield from _calls(request.requests, block_size, name, began_s, place)
            continue
        if request.hash_ids is None:
            raise TraceError(f"{place}: expected hash_ids or requests, got neither (type {request.type!r})")
        yield block_call(
            request.hash_ids,
            block_size,
            request.input_length or 0,
            request.output_length or 0,
            place,
            branch=branch,
            timestamp_s=start_s + time_s,
        )


def check_lengths(input_length: int, output_length: int, source: str) -> None:
    """Raises TraceError unless there is a prompt and both lengths, in tokens, are ones that a model could take."""
    if not 1 <= input_length <= MAX_TOKENS or not 0 <= output_length <= MAX_TOKENS:
        raise TraceError(
            f"{source}: expected an input of 1 to {MAX_TOKENS} tokens and an output of at most as many, "
            f"got {input_length} and {output_length}"
        )


def block_call(
    hash_ids: Sequence[int],
    block_size: int,
    input_length: int,
    output_length: int,
    source: str,
    *,
    branch: str = "main",
    timestamp_s: float | None = None,
) -> BlockCall:
    """A checked BlockCall. Raises TraceError for impossible lengths, or names for more blocks than the prompt has."""
    check_lengths(input_length, output_length, source)
    if block_size < 1:
        raise TraceError(f"{source}: expected a block size of 1 or more, got {block_size}")
    most = -(-input_length // block_size)
    if len(hash_ids) > most:
        raise TraceError(
            f"{source}: expected at most {most} hashes for {input_length} tokens in blocks of {block_size}, "
            f"got {len(hash_ids)}"
        )
    return BlockCall(
        blocks=np.array(hash_ids, dtype=np.int64),
        block_size=block_size,
        input_length=input_length,
        output_length=output_length,
        branch=branch,
        timestamp_s=timestamp_s,
    )
