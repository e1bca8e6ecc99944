"""Trajectories that this project records itself (`jaxhybrid.demo.recorder`), call by call.

  {"format": "jaxhybrid.recorded_calls", "id": "...", "tools"?: [...],
   "calls": [{"branch": "main", "parent": index | null, "keep": n, "append": [messages], "response": message}, ...]}

A call's prompt is the first `keep` messages of its parent's prompt and response, and then `append`. That holds forks,
context edits and re-asked questions without repeating the history in every call.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record, read_entries
from jaxhybrid.traces.lineage import with_parents
from jaxhybrid.traces.readers.messages import normalise
from jaxhybrid.traces.trajectory import Message, MessageCall, Trajectory

FORMAT = "recorded_calls"


class _Call(msgspec.Struct):
    append: list[Any]
    response: dict[str, Any]
    branch: str = "main"
    parent: int | None = None
    keep: int = 0


class _Recording(msgspec.Struct):
    id: str
    calls: list[_Call]
    tools: list[dict[str, Any]] | None = None


def recognises(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == "jaxhybrid.recorded_calls"


def read(records: Iterable[Record]) -> Iterator[Trajectory | TraceError]:
    for record in read_entries(records):
        try:
            recording = record.convert(_Recording)
            if not recording.calls:
                raise TraceError(f"{record.source}: expected at least one call, got none")
            yield Trajectory(recording.id, record.source, FORMAT, with_parents(_calls(recording, record.source)))
        except TraceError as error:
            yield error


def _calls(recording: _Recording, source: str) -> list[MessageCall]:
    tools = tuple(recording.tools) if recording.tools else None
    calls: list[MessageCall] = []
    for number, call in enumerate(recording.calls):
        place = f"{source}: call {number}"
        messages = (
            *_known(call, calls, place)[: call.keep],
            *(normalise(message, f"{place}: appended message {i}") for i, message in enumerate(call.append)),
        )
        if not messages:
            raise TraceError(f"{place}: expected a prompt, got no messages")
        response = normalise(call.response, f"{place}: response")
        calls.append(MessageCall(messages=messages, response=response, tools=tools, branch=call.branch))
    return calls


def _known(call: _Call, earlier: list[MessageCall], place: str) -> tuple[Message, ...]:
    known: tuple[Message, ...] = ()
    if call.parent is not None:
        if not 0 <= call.parent < len(earlier):
            raise TraceError(f"{place}: expected an earlier call as parent, got {call.parent}")
        parent = earlier[call.parent]
        known = (*parent.messages, parent.response)
    if not 0 <= call.keep <= len(known):
        raise TraceError(f"{place}: expected to keep at most {len(known)} messages, got {call.keep}")
    return known
