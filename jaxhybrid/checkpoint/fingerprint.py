"""What a checkpoint is known by: SHA-256 over its tensors, and over its config.

The weights' fingerprint covers each tensor's name, dtype, shape and bytes, in the order of names, so that the same
tensors have the same fingerprint however they are split into files.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxhybrid.checkpoint.json_file import read_json_object, write_json_object
from jaxhybrid.checkpoint.safetensors_folder import CheckpointFolder
from jaxhybrid.errors import CheckpointError

CACHE = ".jaxhybrid-fingerprint.json"

_FORMAT = 1

# For each file its name, size in bytes and time of last change in ns: what tells that a file was replaced.
_Stamps = tuple[tuple[str, int, int], ...]


def weights_fingerprint(folder: CheckpointFolder) -> str:
    """SHA-256 of the folder's tensors, as 64 hexadecimal digits; the data is streamed.

    The result is kept in `.jaxhybrid-fingerprint.json` beside the weights, or in memory where the folder can't be
    written, and used again while the files' names, sizes and times of last change stay the same.
    Raises `CheckpointError` when a file is absent or ends early.
    """
    stamps = _stamps(folder)
    cached = _read_cache(folder.path / CACHE, stamps)
    if cached is not None:
        return cached
    fingerprint = _hash_files(folder.path, stamps)
    with contextlib.suppress(OSError):
        write_json_object(folder.path / CACHE, {"format": _FORMAT, "files": stamps, "sha256": fingerprint})
    return fingerprint


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config, as 64 hexadecimal digits; the order of keys and the file's layout don't matter."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def hash_tensors(folder: CheckpointFolder) -> str:
    """The weights' fingerprint, computed: no cache is read or written."""
    digest = hashlib.sha256()
    for name in sorted(folder.tensors):
        info = folder.tensors[name]
        # One JSON line a tensor, so that no name can be mistaken for another tensor's bytes.
        digest.update(json.dumps([name, info.dtype.name, info.shape, info.nbytes]).encode() + b"\n")
        for piece in folder.stream(name):
            digest.update(piece)
    return digest.hexdigest()


@functools.lru_cache(maxsize=16)
def _hash_files(path: Path, stamps: _Stamps) -> str:
    """`stamps` is part of the key only: the memory of a folder that can't be written."""
    return hash_tensors(CheckpointFolder.open(path))


def _stamps(folder: CheckpointFolder) -> _Stamps:
    try:
        found = [(file.name, file.stat()) for file in folder.files]
    except OSError as error:
        raise CheckpointError(f"{folder.path}: a file of its weights is gone: {error}") from error
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _read_cache(path: Path, stamps: _Stamps) -> str | None:
    """The cached fingerprint, or None when there is none for these files or the cache is damaged."""
    try:
        cache = read_json_object(path)
    except CheckpointError:
        return None
    if cache.get("format") != _FORMAT or cache.get("files") != [list(stamp) for stamp in stamps]:
        return None
    fingerprint = cache.get("sha256")
    is_digest = isinstance(fingerprint, str) and len(fingerprint) == 64 and set(fingerprint) <= set("0123456789abcdef")
    return fingerprint if is_digest else None
