"""Logs of calls as flattened text (the LMCache agent traces).

JSON lines, one call each, in any order:
  {"timestamp": microseconds, "input": "the whole prompt", "output": "the response", "session_id": "..."}
The calls of one session make one trajectory, in order of time. Several roles may share a session unnamed (an agent and
the user that another model plays): each conversation that begins anew is a branch. A call with an empty input is an
error: there is nothing to compute. An output that is empty or null is a response that the log does not hold (a tool
call, say).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record, read_entries
from jaxhybrid.traces.lineage import with_lines, with_parents
from jaxhybrid.traces.trajectory import TextCall, Trajectory

FORMAT = "call_log"


class _Row(msgspec.Struct):
    timestamp: float
    input: str
    output: str | None
    session_id: str | int


def recognises(value: Any) -> bool:
    return isinstance(value, dict) and {"timestamp", "input", "output", "session_id"} <= value.keys()


def read(records: Iterable[Record]) -> Iterator[Trajectory | TraceError]:
    sessions: dict[str, list[tuple[float, str, TextCall]]] = {}
    for record in read_entries(records):
        try:
            row = record.convert(_Row)
            if not row.input:
                raise TraceError(f"{record.source}: expected a prompt, got an empty input")
        except TraceError as error:
            yield error
            continue
        time = row.timestamp / 1e6
        call = TextCall(text=row.input, response_text=row.output or "", timestamp_s=time)
        sessions.setdefault(str(row.session_id), []).append((time, record.source, call))
    for session, calls in sessions.items():
        calls.sort(key=lambda entry: entry[0])
        yield Trajectory(session, calls[0][1], FORMAT, with_lines(with_parents([call for _, _, call in calls])))
