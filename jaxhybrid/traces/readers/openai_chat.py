"""OpenAI chat messages, as one JSON document or as JSON lines.

One trajectory a record, and each assistant message in it is a call:
  {"messages": [{"role", "content", "tool_calls"?, "tool_call_id"?, "name"?, "reasoning_content"?}, ...],
   "tools"?: [...], "id" | "instance_id"?: "...",
   "calls"?: [{"created": unix seconds}, ...]}      mini-swe-agent's own log, one entry an assistant message
or a bare list of messages, or a list of such records. A message may carry the provider's answer as mini-swe-agent
records it, {"extra": {"response": {"created": ...}}}. Messages after the last assistant message belong to no call.

One call a record, told by its `response`:
  {"messages": [...], "response": message | {"choices": [{"message": message}]}, "tools"?: [...],
   "session_id"?: "...", "branch"?: "...", "timestamp"?: seconds}
Calls of one `session_id` (of one file, where there is none) make one trajectory, in order of the file.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record
from jaxhybrid.traces.lineage import with_parents
from jaxhybrid.traces.readers.messages import cut_into_calls, normalise
from jaxhybrid.traces.trajectory import MessageCall, Trajectory

FORMAT = "openai_chat"


class _Conversation(msgspec.Struct):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    calls: list[dict[str, Any]] | None = None
    id: str | int | None = None
    instance_id: str | None = None


class _Exchange(msgspec.Struct):
    messages: list[Any]
    response: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    session_id: str | int | None = None
    branch: str | None = None
    timestamp: float | None = None


def recognises(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and (_is_message(value[0]) or recognises(value[0]))
    return isinstance(value, dict) and isinstance(value.get("messages"), list)


def read(records: Iterable[Record]) -> Iterator[Trajectory | TraceError]:
    sessions: dict[str, list[tuple[Record, MessageCall]]] = {}
    for record in _flat(records):
        try:
            if isinstance(record.value, dict) and "response" in record.value:
                exchange = record.convert(_Exchange)
                call = _call(exchange, record)
                sessions.setdefault(_session(exchange, record), []).append((record, call))
            else:
                yield _conversation(record)
        except TraceError as error:
            yield error
    for session, calls in sessions.items():
        yield Trajectory(session, calls[0][0].source, FORMAT, with_parents([call for _, call in calls]))


def _flat(records: Iterable[Record]) -> Iterator[Record]:
    for record in records:
        if isinstance(record.value, list) and record.value and _is_message(record.value[0]):
            yield Record({"messages": record.value}, record.source, record.file)
        else:
            yield from record.entries()


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value


def _conversation(record: Record) -> Trajectory:
    conversation = record.convert(_Conversation)
    messages = conversation.messages
    tools = tuple(conversation.tools) if conversation.tools else None
    calls = cut_into_calls(messages, record.source, tools=tools, started=_clock(conversation))
    if not calls:
        raise TraceError(f"{record.source}: expected an assistant message after a prompt, got {len(messages)} messages")
    name = conversation.instance_id or conversation.id
    return Trajectory(str(name if name is not None else record.name), record.source, FORMAT, with_parents(calls))


def _clock(conversation: _Conversation) -> Callable[[int], float | None]:
    """Unix seconds at which the provider took the call that ends in message i, where the log says so."""
    assistants = [i for i, message in enumerate(conversation.messages) if message.get("role") == "assistant"]
    log = conversation.calls or []
    log = log if len(log) == len(assistants) else []
    times = {i: entry.get("created") for i, entry in zip(assistants, log, strict=False)}

    def started(i: int) -> float | None:
        time = times.get(i, _dig(conversation.messages[i], "extra", "response", "created"))
        return float(time) if isinstance(time, int | float) else None

    return started


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _session(exchange: _Exchange, record: Record) -> str:
    return str(exchange.session_id) if exchange.session_id is not None else record.file.stem


def _call(exchange: _Exchange, record: Record) -> MessageCall:
    response: Any = exchange.response
    if "choices" in response:
        choices = response["choices"]
        response = _dig(choices[0], "message") if isinstance(choices, list) and choices else None
    if not exchange.messages:
        raise TraceError(f"{record.source}: expected a prompt, got no messages")
    return MessageCall(
        messages=tuple(
            normalise(message, f"{record.source}: message {i}") for i, message in enumerate(exchange.messages)
        ),
        response=normalise(response, f"{record.source}: response"),
        tools=tuple(exchange.tools) if exchange.tools else None,
        branch=exchange.branch or "main",
        timestamp_s=exchange.timestamp,
    )
