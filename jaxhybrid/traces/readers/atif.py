"""Agent Trajectory Interchange Format, ATIF 1.x up to 1.8 (https://github.com/harbor-framework/harbor, RFC 0001).

  {"schema_version": "ATIF-v1.8", "session_id"?, "trajectory_id"?,
   "agent": {"tool_definitions"?: [...]},
   "steps": [{"source": "system" | "user" | "agent", "message": text | [parts], "reasoning_content"?, "timestamp"?,
              "tool_calls"?: [{"tool_call_id", "function_name", "arguments": {}}],
              "observation"?: {"results": [{"source_call_id"?, "content"?, "subagent_trajectory_ref"?}]},
              "llm_call_count"?, "is_copied_context"?}, ...],
   "subagent_trajectories"?: [a trajectory with a trajectory_id, ...]}

Each agent step is a call, unless it was copied from another trajectory or took no model call: then it is context. A
result of a tool call becomes a tool message, any other observation a user message. Sub-agents are branches named by
`trajectory_id` (nested ones joined by "/"). They come where the observation that refers to them stands, before the next
call of their parent; ones that nothing refers to come last. Token ids in `metrics` belong to the recording model's
tokenizer and are not used.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import msgspec

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record, read_entries
from jaxhybrid.traces.lineage import with_parents
from jaxhybrid.traces.readers.messages import cut_into_calls, text_of
from jaxhybrid.traces.trajectory import Message, MessageCall, Trajectory

FORMAT = "atif"

_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


class _ToolCall(msgspec.Struct):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any] | None = None


class _Reference(msgspec.Struct):
    trajectory_id: str | None = None


class _Result(msgspec.Struct):
    source_call_id: str | None = None
    content: str | list[Any] | None = None
    subagent_trajectory_ref: list[_Reference] | None = None


class _Observation(msgspec.Struct):
    results: list[_Result] | None = None


class _Step(msgspec.Struct):
    source: str
    message: str | list[Any] | None = None
    reasoning_content: str | None = None
    timestamp: str | None = None
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None

    @property
    def is_call(self) -> bool:
        return self.source == "agent" and self.llm_call_count != 0 and not self.is_copied_context

    @property
    def results(self) -> list[_Result]:
        return (self.observation.results if self.observation else None) or []


class _Agent(msgspec.Struct):
    tool_definitions: list[dict[str, Any]] | None = None


class _Trajectory(msgspec.Struct):
    steps: list[_Step]
    agent: _Agent | None = None
    session_id: str | None = None
    trajectory_id: str | None = None
    subagent_trajectories: list["_Trajectory"] | None = None


def recognises(value: Any) -> bool:
    return isinstance(value, dict) and str(value.get("schema_version", "")).startswith("ATIF")


def read(records: Iterable[Record]) -> Iterator[Trajectory | TraceError]:
    for record in read_entries(records):
        try:
            document = record.convert(_Trajectory)
            calls = _calls(document, record.source, "main")
            if not calls:
                raise TraceError(f"{record.source}: expected an agent step with a model call, got none")
            name = document.trajectory_id or document.session_id or record.name
            yield Trajectory(name, record.source, FORMAT, with_parents(calls))
        except TraceError as error:
            yield error


def _calls(document: _Trajectory, source: str, branch: str) -> list[MessageCall]:
    """A document's calls with each sub-agent's after the step that refers to it."""
    messages: list[Message] = []
    step_of: list[int] = []
    for number, step in enumerate(document.steps):
        made = _messages(step, f"{source}: {branch} step {number + 1}")
        messages += made
        step_of += [number] * len(made)
    tools = document.agent.tool_definitions if document.agent else None
    own = cut_into_calls(
        messages,
        f"{source}: {branch}",
        branch=branch,
        tools=tuple(tools) if tools else None,
        is_call=lambda i: document.steps[step_of[i]].is_call,
        started=lambda i: _seconds(document.steps[step_of[i]].timestamp, source),
    )
    subagents = document.subagent_trajectories or []
    remaining = {sub.trajectory_id or f"subagent-{i}": sub for i, sub in enumerate(subagents)}
    ordered: list[MessageCall] = []
    own_calls = iter(own)
    for number, step in enumerate(document.steps):
        if step.is_call and number > 0:
            ordered += [next(own_calls)]
        for name in _references(step):
            if name in remaining:
                ordered += _calls(remaining.pop(name), source, _nested(branch, name))
    for name, sub in remaining.items():
        ordered += _calls(sub, source, _nested(branch, name))
    return ordered


def _nested(branch: str, name: str) -> str:
    return name if branch == "main" else f"{branch}/{name}"


def _references(step: _Step) -> list[str]:
    found = [reference for result in step.results for reference in result.subagent_trajectory_ref or []]
    return [reference.trajectory_id for reference in found if reference.trajectory_id]


def _messages(step: _Step, source: str) -> list[Message]:
    if step.source not in _ROLES:
        raise TraceError(f"{source}: expected source {', '.join(_ROLES)}, got {step.source!r}")
    message: Message = {"role": _ROLES[step.source], "content": step.message}
    if step.reasoning_content:
        message["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        message["tool_calls"] = [
            {"id": call.tool_call_id, "function": {"name": call.function_name, "arguments": call.arguments or {}}}
            for call in step.tool_calls
        ]
    return [message, *(_observed(result, source) for result in step.results)]


def _observed(result: _Result, source: str) -> Message:
    content = text_of(result.content, source)
    if result.source_call_id is None:
        return {"role": "user", "content": content}
    return {"role": "tool", "tool_call_id": result.source_call_id, "content": content}


def _seconds(timestamp: str | None, source: str) -> float | None:
    if timestamp is None:
        return None
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except ValueError:
        raise TraceError(f"{source}: expected an ISO 8601 timestamp, got {timestamp!r}") from None
