"""tau-bench: results of runs, and few-shot dialogues.

Results, a JSON list (or one a line):
  {"task_id": 0, "trial": 0, "traj": [OpenAI messages], "reward", "info"}
Trials of a task are trajectories of their own that share a prompt. Tools are not recorded.

Few-shot dialogues, JSON lines:
  {"messages_display": "user: ...\\nassistant: ...\\ntool: ..."}
where "assistant: None" is a turn that held only a tool call, which the dialogue leaves out: its response is empty.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record, read_entries
from jaxhybrid.traces.lineage import with_parents
from jaxhybrid.traces.readers.messages import cut_into_calls
from jaxhybrid.traces.trajectory import Message, Trajectory

FORMAT = "tau_bench"

_TURN = re.compile(r"^(system|user|assistant|tool): ", re.MULTILINE)


class _Result(msgspec.Struct):
    task_id: int | str
    traj: list[Any]
    trial: int | None = None


class _Dialogue(msgspec.Struct):
    messages_display: str


def recognises(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and recognises(value[0])
    return isinstance(value, dict) and ({"task_id", "traj"} <= value.keys() or "messages_display" in value)


def read(records: Iterable[Record]) -> Iterator[Trajectory | TraceError]:
    for record in read_entries(records):
        try:
            yield _trajectory(record)
        except TraceError as error:
            yield error


def _trajectory(record: Record) -> Trajectory:
    if isinstance(record.value, dict) and "messages_display" in record.value:
        name, messages = record.name, _parse(record.convert(_Dialogue).messages_display)
    else:
        result = record.convert(_Result)
        name, messages = f"{record.file.stem}-task{result.task_id}-trial{result.trial or 0}", result.traj
    calls = cut_into_calls(messages, record.source)
    if not calls:
        raise TraceError(f"{record.source}: expected an assistant message after a prompt, got {len(messages)} messages")
    return Trajectory(name, record.source, FORMAT, with_parents(calls))


def _parse(display: str) -> list[Message]:
    pieces = _TURN.split(display)[1:]
    messages = []
    for role, content in zip(pieces[::2], pieces[1::2], strict=True):
        spoken = content.removesuffix("\n")
        messages.append({"role": role, "content": None if (role, spoken) == ("assistant", "None") else spoken})
    return messages
