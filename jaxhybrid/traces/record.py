"""The record of one replay: what every call cost, kept so that a kill loses at most the line being written.

A run owns two files. `run.jsonl` grows by one line per call or sample while the run lasts and is what a resumed run
reads. `report.json` is the whole run as one document, replaced atomically.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeVar

import msgspec

from jaxhybrid.errors import ReportError, TraceError
from jaxhybrid.traces.counters import add_up
from jaxhybrid.traces.simulate import PolicyResult

FORMAT_VERSION = 1


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """One replayed call. Counts are tokens, times are seconds.

    The prompt splits without remainder: `prompt_tokens == resumed + gap + new_tokens`. `resumed` came out of a retained
    bundle; `gap` was known (`matched = resumed + gap`) but computed again for want of a checkpoint; `new_tokens` were
    never seen before. `generated` is the response's length, `context_tokens` the context's length after the call.
    """

    trajectory: str
    call: int
    branch: str = "main"
    parent: int | None = None
    prompt_tokens: int
    matched: int
    resumed: int
    gap: int
    limited_by: str
    """What kept the call from resuming further, in the engine's words: `none`, `cold`, `recurrent`, `template`, ...; or
    `replaced`: the recorded response stands where the model had answered."""
    new_tokens: int
    generated: int
    context_tokens: int
    differing: tuple[int, int, int] | None = None
    """Where the prompt left the path that the last call made: (position, token id expected, token id that came)."""
    ttft_s: float
    decode_s: float
    log_likelihood: float | None = None
    """Natural log, summed over the response."""
    finish_reason: str
    started_s: float
    """Since the run began."""

    def __post_init__(self) -> None:
        if self.prompt_tokens != self.resumed + self.gap + self.new_tokens or self.matched != self.resumed + self.gap:
            raise ValueError(
                f"call {self.call} of {self.trajectory}: expected prompt_tokens = resumed + gap + new_tokens and "
                f"matched = resumed + gap, got prompt_tokens={self.prompt_tokens}, matched={self.matched}, "
                f"resumed={self.resumed}, gap={self.gap}, new_tokens={self.new_tokens}"
            )


class MemorySample(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """State held on the device at `t_s` seconds into the run, in bytes by kind of leaf."""

    t_s: float
    bytes_by_kind: dict[str, int]
    live_sequences: int
    checkpoints: int


class ColdSample(msgspec.Struct, frozen=True, kw_only=True, tag="cold"):
    """The same prompt prefilled from nothing and through the cache: time to first token, seconds."""

    context_tokens: int
    cold_ttft_s: float
    warm_ttft_s: float


class CounterSample(msgspec.Struct, frozen=True, kw_only=True, tag="counters"):
    """The engine's counters so far. `process` counts the processes that a run took: 0, and 1 more each time it resumed.

    A process writes one every now and then and when it ends, each in place of the one before.
    """

    process: int
    values: dict[str, int | float]


class RunHeader(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """What a run is of. A run resumes only under the header it began with.

    `options`: whatever else changes which calls there are, what is in them or what they cost, by name.
    """

    model: str
    mode: str
    traces: tuple[str, ...]
    options: dict[str, str] = {}
    format_version: int = FORMAT_VERSION


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run, finished or interrupted. `errors` are `file:line: what was wrong` and stand for what was skipped."""

    model: str
    mode: str
    traces: tuple[str, ...]
    options: dict[str, str] = {}
    calls: tuple[CallRecord, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    cold: tuple[ColdSample, ...] = ()
    policies: tuple[PolicyResult, ...] = ()
    counters: dict[str, int | float] = {}
    errors: tuple[str, ...] = ()
    interrupted: bool = False
    elapsed_s: float = 0.0
    format_version: int = FORMAT_VERSION


class _Version(msgspec.Struct):
    format_version: int


Decoded = TypeVar("Decoded")
Entry = CallRecord | MemorySample | ColdSample | CounterSample

_VERSION = msgspec.json.Decoder(_Version)
_RUN = msgspec.json.Decoder(RunRecord)
_HEADER = msgspec.json.Decoder(RunHeader)
_ENTRY: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def write_json(record: RunRecord, path: Path) -> Path:
    """Replaces `path` by the record, or leaves it as it was: the document is complete before it takes the name."""
    document = msgspec.json.format(msgspec.json.encode(record), indent=1)
    write_atomically(path, document + b"\n")
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Writes `content` under a temporary name in the same folder, then renames it to `path`.

    Raises ReportError, with `path` as it was, where that cannot be done.
    """
    with _writing(path):
        _replace(path, content)


def make_folder(folder: Path) -> None:
    """Makes the folder that a run is to be written to. Raises ReportError where it cannot be, or takes no files."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReportError(f"{path}: cannot be written: {error.strerror or error}") from error


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> RunRecord:
    """Reads a `report.json`.

    Raises:
        TraceError: the file is missing, is not a run record, or has another format version.
    """
    content = _read(path)
    version = _decode(content, _VERSION, f"{path}").format_version
    if version != FORMAT_VERSION:
        raise TraceError(f"{path}: expected a run record of format_version {FORMAT_VERSION}, got {version}")
    return _decode(content, _RUN, f"{path}")


class RunLog:
    """The growing log of a run. Each entry is on its way to disk when `append` returns.

    Opening an existing log without `resume` starts it anew; with `resume` the entries it holds are kept, an unfinished
    last line is cut off, and `done` names the calls that need no replay.

    Raises:
        TraceError: on resume, when the log belongs to another model, mode, set of traces or format version, or a line
            other than an unfinished last one can't be read.
        ReportError: the log can't be written, here or in `append`.
    """

    def __init__(self, path: Path, header: RunHeader, *, resume: bool = False) -> None:
        self.path = path
        self.header = header
        self.calls: list[CallRecord] = []
        self.memory: list[MemorySample] = []
        self.cold: list[ColdSample] = []
        self._counters: dict[int, dict[str, int | float]] = {}
        self._encoder = msgspec.json.Encoder()
        make_folder(path.parent)
        kept = self._read_entries() if resume and path.exists() else 0
        with _writing(path):
            self._stream: BinaryIO = path.open("r+b" if kept else "wb")
        self._stream.truncate(kept)
        self._stream.seek(kept)
        if not kept:
            self._write(header)
        self.process = max(self._counters, default=-1) + 1

    @property
    def counters(self) -> dict[str, int | float]:
        """Those of all processes, added up. What a process that was killed counted after its last sample is lost."""
        return add_up(self._counters[process] for process in sorted(self._counters))

    @property
    def done(self) -> frozenset[tuple[str, int]]:
        """The (trajectory, call) pairs recorded so far."""
        return frozenset((call.trajectory, call.call) for call in self.calls)

    @property
    def elapsed_s(self) -> float:
        """Seconds into the run of the last entry: where a resumed run's clock goes on."""
        ends = [call.started_s + call.ttft_s + call.decode_s for call in self.calls]
        return max([*ends, *(sample.t_s for sample in self.memory)], default=0.0)

    def append(self, entry: Entry) -> None:
        """Adds one entry and hands it to the operating system."""
        self._keep(entry)
        self._write(entry)

    def record(
        self,
        *,
        policies: Iterable[PolicyResult] = (),
        errors: Iterable[str] = (),
        interrupted: bool = False,
        elapsed_s: float = 0.0,
    ) -> RunRecord:
        """The run as it stands, entries of earlier, resumed runs included."""
        return RunRecord(
            model=self.header.model,
            mode=self.header.mode,
            traces=self.header.traces,
            options=self.header.options,
            calls=tuple(self.calls),
            memory=tuple(self.memory),
            cold=tuple(self.cold),
            policies=tuple(policies),
            counters=self.counters,
            errors=tuple(errors),
            interrupted=interrupted,
            elapsed_s=elapsed_s,
        )

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_entries(self) -> int:
        """Loads the log and returns the number of bytes that are whole lines."""
        content = self.path.read_bytes()
        kept = content.rfind(b"\n") + 1
        lines = content[:kept].split(b"\n")[:-1]
        if not lines:
            return 0
        found = _decode(lines[0], _HEADER, f"{self.path}:1")
        here, there = _named(self.header), _named(found)
        differing = [name for name in {**there, **here} if here.get(name) != there.get(name)]
        if differing:
            wanted, came = (", ".join(f"{n}={run.get(n)!r}" for n in differing) for run in (here, there))
            raise TraceError(f"{self.path}:1: can't resume another run: expected {wanted}, got {came}")
        for number, line in enumerate(lines[1:], start=2):
            self._keep(_decode(line, _ENTRY, f"{self.path}:{number}"))
        return kept

    def _keep(self, entry: Entry) -> None:
        if isinstance(entry, CallRecord):
            self.calls.append(entry)
        elif isinstance(entry, MemorySample):
            self.memory.append(entry)
        elif isinstance(entry, CounterSample):
            self._counters[entry.process] = entry.values
        else:
            self.cold.append(entry)

    def _write(self, entry: RunHeader | Entry) -> None:
        with _writing(self.path):
            self._stream.write(self._encoder.encode(entry) + b"\n")
            self._stream.flush()


def _named(header: RunHeader) -> dict[str, object]:
    """A header's fields by name, its options among them."""
    fields = {name: getattr(header, name) for name in RunHeader.__struct_fields__ if name != "options"}
    return fields | header.options


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: expected a run record, got {error.strerror or error}") from error


def _decode(content: bytes, decoder: msgspec.json.Decoder[Decoded], where: str) -> Decoded:
    try:
        return decoder.decode(content)
    except msgspec.DecodeError as error:
        raise TraceError(f"{where}: expected a run record, got {error}") from error
