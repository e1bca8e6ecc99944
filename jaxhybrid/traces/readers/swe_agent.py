"""SWE-agent `.traj` files.

  {"history": [{"role", "content", "agent"?, "is_demo"?, "tool_calls"?, "tool_call_ids"?}, ...],
   "trajectory": [{"response", "query"?: [messages]}, ...]}

Entries of `history` belong to the agent that they name ("agent"); each agent sees only its own. The first one is the
branch "main", others are branches by their name. An assistant entry marked `is_demo` is part of the prompt, not a call.

SWE-agent 1.1 and later record what each step really sent as `query` (after history processors dropped old
observations). Where every step has one, the prompts come from there, and the responses are the steps'; a response's
tool calls are taken from the history's next assistant entry, if that has the same text.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record, read_entries
from jaxhybrid.traces.lineage import with_parents
from jaxhybrid.traces.readers.messages import cut_into_calls, normalise, text_of
from jaxhybrid.traces.trajectory import Message, MessageCall, Trajectory

FORMAT = "swe_agent"


class _Step(msgspec.Struct):
    response: str | None = None
    query: list[dict[str, Any]] | None = None


class _Run(msgspec.Struct):
    history: list[dict[str, Any]]
    trajectory: list[_Step] | None = None


def recognises(value: Any) -> bool:
    return isinstance(value, dict) and {"history", "trajectory"} <= value.keys()


def read(records: Iterable[Record]) -> Iterator[Trajectory | TraceError]:
    for record in read_entries(records):
        try:
            run = record.convert(_Run)
            asked = bool(run.trajectory) and all(step.query for step in run.trajectory or ())
            calls = _from_queries(run, record.source) if asked else _from_history(run, record.source)
            if not calls:
                raise TraceError(f"{record.source}: expected an assistant entry in history, got none")
            yield Trajectory(record.name, record.source, FORMAT, with_parents(calls))
        except TraceError as error:
            yield error


def _openai(entry: dict[str, Any]) -> Message:
    ids = entry.get("tool_call_ids")
    return {**entry, "tool_call_id": ids[0]} if isinstance(ids, list) and ids else entry


def _from_history(run: _Run, source: str) -> list[MessageCall]:
    """Calls in order of the history, each with its own agent's earlier entries as prompt."""
    positions: dict[str, list[int]] = {}
    for i, entry in enumerate(run.history):
        positions.setdefault(entry.get("agent") or "main", []).append(i)
    calls: dict[int, MessageCall] = {}
    for number, (agent, mine) in enumerate(positions.items()):
        entries = [_openai(run.history[i]) for i in mine]
        responses = [i for i, entry in zip(mine, entries, strict=True) if _is_response(entry)]
        own = cut_into_calls(
            entries,
            f"{source}: agent {agent}",
            branch="main" if number == 0 else agent,
            is_call=lambda k, entries=entries: _is_response(entries[k]),  # type: ignore[misc]
        )
        calls.update(zip(responses[len(responses) - len(own) :], own, strict=True))
    return [calls[i] for i in sorted(calls)]


def _is_response(entry: dict[str, Any]) -> bool:
    return entry.get("role") == "assistant" and not entry.get("is_demo")


def _from_queries(run: _Run, source: str) -> list[MessageCall]:
    written = [entry for entry in run.history if _is_response(entry)]
    calls = []
    for number, step in enumerate(run.trajectory or ()):
        place = f"{source}: step {number}"
        response: Message = {"role": "assistant", "content": step.response}
        if written and text_of(written[0].get("content"), place) == (step.response or ""):
            response = written.pop(0)
        prompt = tuple(normalise(_openai(message), f"{place}: query") for message in step.query or ())
        calls.append(MessageCall(messages=prompt, response=normalise(response, place)))
    return calls
