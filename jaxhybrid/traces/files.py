"""Trace files found and split into JSON records, each with the place it came from."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jaxhybrid.errors import TraceError

SUFFIXES = (".json", ".jsonl", ".traj")

S = TypeVar("S")


@dataclass(frozen=True)
class Record:
    """One decoded JSON value and its place: "file:line", or "file[index]" for an entry of a JSON list."""

    value: Any
    source: str
    file: Path

    @property
    def name(self) -> str:
        """A name for what the record holds where it gives none: the file's, with the line or index if not the first."""
        place = self.source.removeprefix(str(self.file))
        return self.file.stem if place == ":1" else f"{self.file.stem}{place}"

    def entries(self) -> Iterator["Record"]:
        """The record itself, or one record for each entry when its value is a list."""
        if not isinstance(self.value, list):
            yield self
            return
        for index, value in enumerate(self.value):
            yield Record(value, f"{self.file}[{index}]", self.file)

    def convert(self, schema: type[S]) -> S:
        """The value checked against a msgspec schema. Raises TraceError naming the field that does not fit."""
        try:
            return msgspec.convert(self.value, schema)
        except msgspec.ValidationError as error:
            raise TraceError(f"{self.source}: {error}") from None


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The trace files among and under `paths`, each folder's in order of name.

    In folders only names ending in one of `SUFFIXES` count; a file named outright always does.
    Raises TraceError for a path that does not exist, and when there is no file at all.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        elif path.is_file():
            files.append(path)
        else:
            raise TraceError(f"{path}: no such file or folder")
    if not files:
        raise TraceError(f"no trace files ({', '.join(SUFFIXES)}) under {', '.join(map(str, paths))}")
    return list(dict.fromkeys(files))


def content_fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 over the files' contents, in order. Raises TraceError for one that cannot be read."""
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError as error:
            raise TraceError(f"{file}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def read_records(file: Path) -> Iterator[Record | TraceError]:
    """A file's JSON records: one a line if it is JSONL (by name, or by its first line), else the whole file as one.

    What cannot be decoded comes as a TraceError value that names file and line; reading goes on after it.
    """
    empty = True
    try:
        for item in _read_lines(file) if _has_record_a_line(file) else _read_whole(file):
            empty = False
            yield item
        if empty:
            yield TraceError(f"{file}: expected JSON, got an empty file")
    except OSError as error:
        yield TraceError(f"{file}: cannot be read: {error.strerror}")


def read_entries(records: Iterable[Record]) -> Iterator[Record]:
    """All records, with lists taken apart."""
    for record in records:
        yield from record.entries()


def _has_record_a_line(file: Path) -> bool:
    if file.suffix == ".jsonl":
        return True
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    return isinstance(_decode(first, file, 1), Record)


def _read_whole(file: Path) -> Iterator[Record | TraceError]:
    content = file.read_bytes()
    if content.strip():
        yield _decode(content, file, 1)


def _read_lines(file: Path) -> Iterator[Record | TraceError]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _decode(line.rstrip(), file, number)


def _broken(error: json.JSONDecodeError) -> str:
    if error.msg.startswith("Unterminated string"):
        return f"got a string from column {error.colno} on that does not end"
    if error.pos >= len(error.doc.rstrip()):
        return f"got text that breaks off at column {error.colno}"
    return f"got {error.doc[error.pos]!r} at column {error.colno} ({error.msg.lower()})"


def _decode(data: bytes, file: Path, line: int) -> Record | TraceError:
    try:
        return Record(json.loads(data), f"{file}:{line}", file)
    except json.JSONDecodeError as error:
        return TraceError(f"{file}:{line + error.lineno - 1}: expected JSON, {_broken(error)}")
    except UnicodeDecodeError as error:
        return TraceError(f"{file}:{line}: expected UTF-8, got byte {error.object[error.start]:#04x}")
    except RecursionError:
        return TraceError(f"{file}:{line}: expected JSON, got values nested too deeply")
