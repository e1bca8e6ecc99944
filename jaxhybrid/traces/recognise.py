"""Which format a trace file has, by its content, and the file read with that format's reader."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record, read_records
from jaxhybrid.traces.readers import (
    atif,
    call_log,
    mooncake,
    openai_chat,
    recorded_calls,
    swe_agent,
    tau_bench,
    tracelab,
    weka,
)
from jaxhybrid.traces.trajectory import Trajectory


class Reader(Protocol):
    """A format's module: its name, whether a decoded JSON value looks like it, and records made trajectories.

    `read` yields a TraceError, naming the place, for each record that it cannot use, and goes on.
    """

    FORMAT: str

    def recognises(self, value: Any) -> bool: ...

    def read(self, records: Iterable[Record]) -> Iterator[Trajectory | TraceError]: ...


_MODULES: tuple[Reader, ...] = (
    atif,
    call_log,
    mooncake,
    openai_chat,
    recorded_calls,
    swe_agent,
    tau_bench,
    tracelab,
    weka,
)
READERS: dict[str, Reader] = {module.FORMAT: module for module in _MODULES}


def recognise(value: Any) -> Reader | None:
    """The reader for a decoded JSON value, or None. Formats are told apart by fields that no two share."""
    return next((reader for reader in READERS.values() if reader.recognises(value)), None)


def reader_named(name: str) -> Reader:
    """The reader of a format. Raises TraceError listing the known formats."""
    if name not in READERS:
        raise TraceError(f"unknown trace format {name!r}: expected one of {', '.join(READERS)}")
    return READERS[name]


def read_file(file: Path, format: str | None = None) -> Iterator[Trajectory | TraceError]:
    """A trace file's trajectories in order, with a TraceError value for everything in it that cannot be used.

    The format is that of the first record that any reader recognises, unless `format` names one.
    """
    errors: list[TraceError] = []
    forced = reader_named(format) if format else None
    reader, records = _choose(_keep_records(read_records(file), errors), errors, forced)
    if reader is not None:
        for item in reader.read(records):
            yield from _drain(errors)
            if forced and isinstance(item, TraceError):
                item = TraceError(f"{item} (read as {reader.FORMAT}, as asked for)")
            yield item
    yield from _drain(errors)


def _choose(
    records: Iterator[Record], errors: list[TraceError], forced: Reader | None
) -> tuple[Reader | None, Iterator[Record]]:
    """The reader to use and the records from the first that it recognises."""
    if forced is not None:
        return forced, records
    for record in records:
        reader = recognise(record.value)
        if reader is not None:
            return reader, _chain(record, records)
        known = ", ".join(READERS)
        errors.append(TraceError(f"{record.source}: expected one of {known}, got {_describe(record.value)}"))
    return None, records


def _chain(first: Record, rest: Iterator[Record]) -> Iterator[Record]:
    yield first
    yield from rest


def _keep_records(items: Iterable[Record | TraceError], errors: list[TraceError]) -> Iterator[Record]:
    for item in items:
        if isinstance(item, TraceError):
            errors.append(item)
        else:
            yield item


def _drain(errors: list[TraceError]) -> Iterator[TraceError]:
    while errors:
        yield errors.pop(0)


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(list(map(str, value))[:8]) or 'no fields'}"
    return f"a {type(value).__name__}"
