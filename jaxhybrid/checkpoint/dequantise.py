"""Tensors that a checkpoint stores quantised, under their unquantised names: families never know of quantisation.

`config.json` says in `quantization_config` how weights are stored; the tensors' names and dtypes say which ones are.
A quantised tensor and its scales become one logical tensor of a float dtype that holds every value exactly or, for
products with a scale of full precision, float32. Decoding goes by rows, so that a read takes the logical tensor and
its stored form, and no third copy.

    method in config.json                            stored tensors                                     logical dtype
    fp8 (DeepSeek-V3)                                X.weight F8_E4M3, X.weight_scale_inv               float32
    fp8 (DeepSeek-V4)                                X.weight F8_E4M3, X.scale F8_E8M0                  float32
                                                     X.weight I8, two FP4 a byte; X.scale a group of 32 bfloat16
    mxfp4 (gpt-oss)                                  X_blocks, X_scales U8                              bfloat16
    compressed-tensors mxfp4-pack-quantized (K3)     X.weight_packed U8, X.weight_scale U8              bfloat16
    compressed-tensors pack-quantized (K2 Thinking)  X.weight_packed I32, X.weight_scale, X.weight_shape float32

FP4 is E2M1 with a power of two (E8M0) for each group of 32 (OCP Microscaling Formats 1.0), the low nibble first.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, Shaped

from jaxhybrid.checkpoint.safetensors_folder import CONFIG, CheckpointFolder, TensorInfo
from jaxhybrid.errors import CheckpointError, ConfigError

GROUP = 32  # weights that share a scale, in the formats of 4 bits

_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
_E4M3, _E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
_BYTES = (np.dtype(np.uint8), np.dtype(np.int8))
_FLOATS = (_FLOAT32, _BFLOAT16, np.dtype(np.float16))

_ALL_BYTES = np.arange(256, dtype=np.uint8)
_E4M3_VALUES = _ALL_BYTES.view(_E4M3).astype(np.float32)
_E8M0_VALUES = _ALL_BYTES.view(_E8M0).astype(np.float32)
_FP4_VALUES = _ALL_BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
# Of each byte its two float32 as one item: looking up one is faster than looking up a row of two.
_FP4_PAIRS = np.stack([_FP4_VALUES[_ALL_BYTES & 15], _FP4_VALUES[_ALL_BYTES >> 4]], axis=-1).view(np.uint64)[:, 0]

_PART_VALUES = 1 << 22  # decoded at a time

Decode = Callable[..., Float[np.ndarray, "..."]]


@dataclass(frozen=True)
class Companion:
    """A tensor that is stored beside the quantised one: its name, and the shape and dtypes it must have."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[np.dtype, ...]


@dataclass(frozen=True)
class Recipe:
    """How one logical tensor is made: `decode(stored, *companions)` has its shape and dtype."""

    logical: str
    stored: str
    companions: tuple[Companion, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    decode: Decode


Scheme = Callable[[Mapping[str, TensorInfo]], Iterator[Recipe]]


@dataclass(frozen=True, eq=False)
class DequantisedFolder:
    """A `CheckpointFolder` as if nothing in it were quantised: the same interface, its logical tensors.

    A logical tensor's `TensorInfo` has the file and offset of its quantised values. `problems` has a line for each
    scale that is missing or has the wrong shape or dtype; `fill` reports them with its own.
    """

    folder: CheckpointFolder
    tensors: Mapping[str, TensorInfo]
    problems: tuple[str, ...]
    recipes: Mapping[str, Recipe]

    @classmethod
    def over(cls, folder: CheckpointFolder) -> Self:
        """Raises `ConfigError` for a `quantization_config` that is none of the module's table."""
        scheme = scheme_of(folder.config, str(folder.path / CONFIG))
        if scheme is None:
            return cls(folder, folder.tensors, (), {})
        tensors, recipes = dict(folder.tensors), {}
        problems: list[str] = []
        for recipe in scheme(folder.tensors):
            info = tensors.pop(recipe.stored)
            for companion in recipe.companions:
                problems += _companion_problems(companion, recipe, folder.tensors)
                tensors.pop(companion.name, None)
            tensors[recipe.logical] = replace(info, name=recipe.logical, shape=recipe.shape, dtype=recipe.dtype)
            recipes[recipe.logical] = recipe
        return cls(folder, tensors, tuple(problems), recipes)

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def config(self) -> Mapping[str, Any]:
        return self.folder.config

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """One logical tensor, decoded. Raises `CheckpointError` as `CheckpointFolder.read` does."""
        recipe = self.recipes.get(name)
        if recipe is None:
            return self.folder.read(name)
        companions = [self.folder.read(companion.name) for companion in recipe.companions]
        try:
            return recipe.decode(self.folder.read(recipe.stored), *companions)
        except ValueError as error:
            raise CheckpointError(f"{self.tensors[name].file}: tensor {name!r}: {error}") from error


def _companion_problems(companion: Companion, recipe: Recipe, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    info = tensors.get(companion.name)
    if info is None:
        yield f"{companion.name!r}: missing, {recipe.stored!r} is quantised and needs it"
        return
    where = f"{info.file.name}: {companion.name!r}"
    if info.shape != companion.shape:
        stored = tensors[recipe.stored].shape
        yield f"{where}: expected shape {companion.shape} for {recipe.stored!r} {stored}, found {info.shape}"
    if info.dtype not in companion.dtypes:
        yield f"{where}: expected {' or '.join(map(str, companion.dtypes))}, found {info.dtype}"


# Which scheme


def scheme_of(config: Mapping[str, Any], where: str) -> Scheme | None:
    """The scheme that `quantization_config` names, of the model or of its `text_config`; None without one.

    Raises `ConfigError`, beginning with `where`, for a method, format or option that is not implemented.
    """
    text = config.get("text_config")
    quantised = config.get("quantization_config") or (text or {}).get("quantization_config")
    if quantised is None:
        return None
    where = f"{where}: quantization_config"
    match quantised.get("quant_method"):
        case "fp8":
            return _fp8_scheme(quantised, where)
        case "mxfp4":
            return gpt_oss_mxfp4
        case "compressed-tensors":
            return _compressed_scheme(quantised, where)
        case method:
            raise ConfigError(f"{where}: quant_method={method!r} is not supported")


def _fp8_scheme(quantised: Mapping[str, Any], where: str) -> Scheme:
    block = quantised.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        raise ConfigError(f"{where}: expected weight_block_size as [rows, columns], found {block!r}")
    if quantised.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(f"{where}: fmt={quantised['fmt']!r} is not supported, expected 'e4m3'")
    return lambda tensors: fp8_blocks(tensors, tuple(block))


def _compressed_scheme(quantised: Mapping[str, Any], where: str) -> Scheme:
    groups = list(quantised.get("config_groups", {}).values())
    formats = {group.get("format") or quantised.get("format") for group in groups} or {quantised.get("format")}
    for group in groups:
        weights = group["weights"]
        found = (weights.get("num_bits"), weights.get("group_size"), weights.get("symmetric", True))
        if found != (4, GROUP, True) or weights.get("actorder") is not None:
            raise ConfigError(f"{where}: expected symmetric weights of 4 bits in groups of {GROUP}, found {weights}")
    if formats == {"mxfp4-pack-quantized"}:
        return packed_mxfp4
    if formats == {"pack-quantized"}:
        return packed_int4
    raise ConfigError(f"{where}: format {', '.join(map(repr, formats))} is not supported")


# Which tensors each scheme makes


def fp8_blocks(tensors: Mapping[str, TensorInfo], block: tuple[int, int]) -> Iterator[Recipe]:
    """FP8 weights with a scale for each block of rows and columns; packed FP4 where `X.scale` goes with bytes."""
    beside = any(name.endswith(".scale") for name in tensors)
    for name, info in tensors.items():
        scale = f"{name.removesuffix('.weight')}.scale" if beside else f"{name}_scale_inv"
        *lead, rows, columns = info.shape if len(info.shape) > 1 else (1, 1)
        if info.dtype == _E4M3 and len(info.shape) > 1:
            shape = (*lead, -(-rows // block[0]), -(-columns // block[1]))
            scales = Companion(scale, shape, (_E8M0,) if beside else _FLOATS)
            yield Recipe(name, name, (scales,), info.shape, _FLOAT32, lambda w, s: decode_fp8(w, s, block))
        elif beside and info.dtype in _BYTES and name.endswith(".weight"):
            scales = Companion(scale, (*lead, rows, -(-2 * columns // GROUP)), (_E8M0, *_BYTES))
            yield Recipe(name, name, (scales,), (*lead, rows, 2 * columns), _BFLOAT16, decode_fp4)


def gpt_oss_mxfp4(tensors: Mapping[str, TensorInfo]) -> Iterator[Recipe]:
    """Blocks [experts, out, groups, 16] as the unquantised release lays them out: [experts, in, out]."""
    for name, info in tensors.items():
        if name.endswith("_blocks") and info.dtype in _BYTES and len(info.shape) > 2:
            *lead, rows, groups, width = info.shape
            logical = name.removesuffix("_blocks")
            scales = Companion(f"{logical}_scales", (*lead, rows, groups), _BYTES)
            yield Recipe(logical, name, (scales,), (*lead, 2 * groups * width, rows), _BFLOAT16, _decode_blocks)


def packed_mxfp4(tensors: Mapping[str, TensorInfo]) -> Iterator[Recipe]:
    for name, info, base in _packed(tensors, _BYTES):
        *lead, columns = info.shape
        scales = Companion(f"{base}_scale", (*lead, -(-2 * columns // GROUP)), (*_BYTES, _E8M0))
        yield Recipe(base, name, (scales,), (*lead, 2 * columns), _BFLOAT16, decode_fp4)


def packed_int4(tensors: Mapping[str, TensorInfo]) -> Iterator[Recipe]:
    for name, info, base in _packed(tensors, (np.dtype(np.int32),)):
        *lead, columns = info.shape
        scales = Companion(f"{base}_scale", (*lead, -(-8 * columns // GROUP)), _FLOATS)
        shape = Companion(f"{base}_shape", (len(info.shape),), (np.dtype(np.int64), np.dtype(np.int32)))
        yield Recipe(base, name, (scales, shape), (*lead, 8 * columns), _FLOAT32, decode_int4)


def _packed(tensors: Mapping[str, TensorInfo], dtypes: tuple[np.dtype, ...]) -> Iterator[tuple[str, TensorInfo, str]]:
    for name, info in tensors.items():
        if name.endswith(".weight_packed") and info.dtype in dtypes:
            yield name, info, name.removesuffix("_packed")


# Decoding


def decode_fp8(
    values: Shaped[np.ndarray, "*lead o i"], scales: Shaped[np.ndarray, "*lead O I"], block: tuple[int, int]
) -> Float[np.ndarray, "*lead o i"]:
    """E4M3 times the scale of its block [block rows, block columns]; blocks at the edges may be cut."""
    out = np.empty(values.shape, np.float32)
    columns, scales = values.shape[-1], scales.astype(np.float32)
    for at in np.ndindex(*scales.shape[:-1]):
        rows = (*at[:-1], slice(at[-1] * block[0], (at[-1] + 1) * block[0]))
        np.multiply(_E4M3_VALUES[values[rows].view(np.uint8)], np.repeat(scales[at], block[1])[:columns], out=out[rows])
    return out


def decode_fp4(
    packed: Int[np.ndarray, "*lead n"], scales: Shaped[np.ndarray, "*lead G"]
) -> Float[np.ndarray, "*lead 2*n"]:
    """Pairs of E2M1 in bytes, times 2^(scale - 127) of their group: bfloat16, exact. Scale 255 is NaN."""
    powers = _E8M0_VALUES[scales.view(np.uint8)]
    return _decode_rows(packed.view(np.uint8), powers, 2, _BFLOAT16, lambda rows: _FP4_PAIRS[rows].view(np.float32))


def decode_int4(
    packed: Int[np.ndarray, "*lead n"], scales: Float[np.ndarray, "*lead G"], shape: Int[np.ndarray, " dims"]
) -> Float[np.ndarray, "*lead 8*n"]:
    """Eight integers of -8 to 7 in a word, each stored plus 8, the lowest bits first; times their group's scale.

    Raises ValueError when `shape`, which the checkpoint stores too, is another one.
    """
    found = (*packed.shape[:-1], 8 * packed.shape[-1])
    if tuple(shape) != found:
        raise ValueError(f"expected shape {found} as packed, its weight_shape says {tuple(map(int, shape))}")
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return _decode_rows(
        packed.view(np.uint32),
        scales,
        8,
        _FLOAT32,
        lambda words: ((words[..., None] >> shifts) & 15).astype(np.int8) - 8,
    )


def _decode_blocks(
    blocks: Int[np.ndarray, "*lead o groups 16"], scales: Int[np.ndarray, "*lead o groups"]
) -> Float[np.ndarray, "*lead i o"]:
    return decode_fp4(blocks.reshape(*blocks.shape[:-2], -1), scales).swapaxes(-1, -2)


def _decode_rows(
    packed: Int[np.ndarray, "*lead n"],
    scales: Float[np.ndarray, "*lead G"],
    per_item: int,
    dtype: np.dtype,
    unpack: Callable[[Int[np.ndarray, "r n"]], Shaped[np.ndarray, "r n per_item"]],
) -> Float[np.ndarray, "*lead n*per_item"]:
    """`unpack` of some rows at a time, times their scales in float32, as `dtype`, which must hold them exactly."""
    columns = packed.shape[-1] * per_item
    whole = columns // GROUP * GROUP
    rows, row_scales = packed.reshape(-1, packed.shape[-1]), scales.reshape(-1, scales.shape[-1])
    out = np.empty((len(rows), columns), dtype)
    step = max(1, _PART_VALUES // max(columns, 1))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        factors = row_scales[part].astype(np.float32)
        values = unpack(rows[part]).reshape(-1, columns).astype(np.float32, copy=False)
        groups = values[:, :whole].reshape(len(values), -1, GROUP)
        groups *= factors[:, : groups.shape[1], None]
        values[:, whole:] *= factors[:, groups.shape[1] :]
        # An exact bfloat16 is the upper half of its float32: many times as fast as the cast.
        out[part] = values if dtype == _FLOAT32 else values.view(_BFLOAT16)[:, 1::2]
    return out.reshape(*packed.shape[:-1], columns)
