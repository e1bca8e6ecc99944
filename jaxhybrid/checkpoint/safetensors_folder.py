"""A Hugging Face checkpoint folder: `config.json` and safetensors files, read one tensor at a time.

The file format is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data_offsets), then the
data (https://github.com/huggingface/safetensors#format). Headers are parsed here and data is read with plain reads into
one buffer per tensor: a memory map would leave every page that was read in the process's resident memory.
"""

import json
import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from jaxhybrid.checkpoint.json_file import no_duplicates, read_json_object
from jaxhybrid.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
_STREAM_BYTES = 1 << 22


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `nbytes` bytes from `offset` of `file`, which is the full path."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class CheckpointFolder:
    """An opened checkpoint folder: its config and the whereabouts of its tensors. Holds no tensor data."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read `config.json` and every safetensors header of the folder.

        Raises `CheckpointError` when a file is absent, unreadable, truncated or contradicts another.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: expected a checkpoint folder, found {_what_is(folder)}")
        return cls(folder, read_config(folder), _find_tensors(folder))

    @property
    def problems(self) -> tuple[str, ...]:
        """None: what headers alone can show is an error of `open`."""
        return ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files that hold the tensors, by name."""
        return tuple(sorted({info.file for info in self.tensors.values()}))

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """One tensor, in its published shape and dtype, in memory of its own.

        Raises `CheckpointError` when the checkpoint has no such tensor or the file ends before the tensor does.
        """
        info = self._info(name)
        buffer = _own_pages(info.nbytes)
        view = buffer.data
        with _open_data(info) as file:
            filled = 0
            while filled < info.nbytes and (count := file.readinto(view[filled:])):
                filled += count
        _check_complete(info, filled)
        return buffer.view(info.dtype).reshape(info.shape)

    def stream(self, name: str) -> Iterator[bytes]:
        """The tensor's bytes as stored, in pieces of a few MiB. Raises as `read` does."""
        info = self._info(name)
        remaining = info.nbytes
        with _open_data(info) as file:
            while remaining and (piece := file.read(min(remaining, _STREAM_BYTES))):
                remaining -= len(piece)
                yield piece
        _check_complete(info, info.nbytes - remaining)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: no tensor {name!r} among its {len(self.tensors)}")
        return self.tensors[name]


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`. Infinity and NaN are accepted bare and as `{"__float__": "Infinity"}`.

    Raises `CheckpointError` when the file is absent or is no JSON object.
    """
    return read_json_object(folder / CONFIG, object_hook=_decode_float)


def _decode_float(value: dict[str, Any]) -> Any:
    if value.keys() != {"__float__"}:
        return value
    text = value["__float__"]
    if not isinstance(text, str):
        raise ValueError(f"__float__ with {text!r}")
    return float(text)


def _what_is(path: Path) -> str:
    return "a file" if path.exists() else "nothing"


def _open_data(info: TensorInfo) -> FileIO:
    try:
        file = info.file.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read for tensor {info.name!r}: {error}") from error
    file.seek(info.offset)
    return file


def _check_complete(info: TensorInfo, count: int) -> None:
    if count != info.nbytes:
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} expected {info.nbytes} bytes from offset {info.offset}, got {count}"
        )


def _own_pages(nbytes: int) -> Shaped[np.ndarray, " nbytes"]:
    """Zeroed memory in pages of its own, outside the heap.

    It goes back to the system when dropped, where freed heap blocks would stay, and it is aligned well enough for
    XLA's CPU client to take it over without a copy.
    """
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8, count=nbytes)


# Which files, which tensors


def _find_tensors(folder: Path) -> dict[str, TensorInfo]:
    if (folder / WEIGHTS).exists():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        raise CheckpointError(
            f"{folder}: expected {WEIGHTS} or {INDEX}, found "
            + (f"only {', '.join(others[:5])}" if others else "no safetensors file")
        )
    weight_map = _read_index(folder / INDEX)
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            first = min(name for name, file in weight_map.items() if file == shard)
            raise CheckpointError(f"{folder / INDEX}: names the file {shard} (for tensor {first!r}), which is absent")
        for name, info in read_header(folder / shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is in two files, {tensors[name].file.name} and {shard}"
                )
            tensors[name] = info
    for name, shard in sorted(weight_map.items()):
        if name not in tensors or tensors[name].file.name != shard:
            found = f"found it in {tensors[name].file.name}" if name in tensors else "found it nowhere"
            raise CheckpointError(f"{folder / INDEX}: expected tensor {name!r} in {shard}, {found}")
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path, object_pairs_hook=no_duplicates).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected a non-empty object 'weight_map' of tensor name -> file name")
    for name, shard in weight_map.items():
        # A name with a folder in it could point outside the checkpoint.
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\]+\.safetensors", shard):
            raise CheckpointError(f"{path}: tensor {name!r}: expected the name of a safetensors file, found {shard!r}")
    return weight_map


# One file's header


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, from its header alone.

    Raises `CheckpointError` when the header is no safetensors header, has duplicates, overlaps or gaps, names an
    unknown dtype, or describes more or fewer data bytes than the file has.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length_field = file.read(8)
            if len(length_field) < 8:
                raise CheckpointError(f"{path}: expected a safetensors file, found {size} bytes in all")
            (length,) = struct.unpack("<Q", length_field)
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path}: garbage or truncated: {length} bytes of header announced, {size} in the file"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: garbage in its header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: garbage in its header: expected an object, found {type(header).__name__}")
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_extent(path, tensors, 8 + length, size)
    return tensors


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets in the header, found {entry!r:.100}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{where}: expected a dtype of {', '.join(DTYPES)}, found {entry['dtype']!r}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where}: expected counts for shape and two data_offsets, found {shape!r:.100} and {offsets!r:.100}"
        )
    dtype = DTYPES[entry["dtype"]]
    start, end = offsets
    if end - start != (expected := math.prod(shape) * dtype.itemsize):
        raise CheckpointError(
            f"{where}: expected {expected} bytes for {entry['dtype']} {tuple(shape)}, data_offsets give {end - start}"
        )
    return TensorInfo(name, tuple(shape), dtype, path, data_start + start, end - start)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_extent(path: Path, tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    position = data_start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            raise CheckpointError(
                f"{path}: tensor {info.name!r}: expected its data from byte {position}, found from {info.offset}"
            )
        position += info.nbytes
        if position > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {info.name!r} expected to end at byte {position}, the file has {size}"
            )
    if position != size:
        raise CheckpointError(f"{path}: expected {position} bytes by its header, the file has {size}")
