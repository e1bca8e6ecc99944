"""Fill a parameter tree from a checkpoint, tensor by tensor, by a table of rules.

Knows nothing of model families: a family gives the rules. One tensor is on the host at a time; a leaf that stacks
several tensors (layer repeats, experts) is allocated once and filled in place, so the peak of host memory is the
model plus at most two copies of its largest tensor.
"""

import functools
import gc
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Shaped

from jaxhybrid.checkpoint.problems import dtype_kind, raise_problems, show_path
from jaxhybrid.checkpoint.safetensors_folder import TensorInfo
from jaxhybrid.placement import zeros

LeafPath = tuple[Any, ...]  # keys, as Flax gives them: str and int
Leaves = dict[LeafPath, Shaped[Array, "..."]]


class TensorSource(Protocol):
    """What `fill` needs of a checkpoint: `CheckpointFolder`, or `DequantisedFolder` over one."""

    @property
    def path(self) -> Path: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def problems(self) -> tuple[str, ...]: ...
    def read(self, name: str) -> Shaped[np.ndarray, "..."]: ...


@dataclass(frozen=True)
class WeightRule:
    """Where one tensor of the checkpoint goes. One tensor may have several rules (a fused tensor, taken apart).

    name: the tensor's published name.
    path: the leaf in the parameter tree.
    index: the position in the leaf's leading (stacked) dimensions; () fills the whole leaf.
    shape: the published shape, when it isn't that of the place it fills: the tensor is reshaped.
    convert: applied to the tensor on the host, before the reshape; it must return an array of its own dtype kind.
    """

    name: str
    path: LeafPath
    index: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    convert: Callable[[Shaped[np.ndarray, "..."]], Shaped[np.ndarray, "..."]] | None = None


def fill(
    abstract: Mapping[LeafPath, jax.ShapeDtypeStruct],
    rules: Sequence[WeightRule],
    folder: TensorSource,
    ignore: Iterable[str] = (),
    check_finite: bool = True,
) -> Leaves:
    """The leaves of `abstract`, filled from the checkpoint and cast to their dtype, sharding and layout.

    ignore: regular expressions; a tensor whose whole name matches one may lie in the checkpoint without a rule.
    check_finite: refuse values that are NaN or infinite in the leaf's dtype.

    Raises one `CheckpointError` with all problems: tensors that are missing, that no rule knows, that have the wrong
    shape or kind of dtype, and leaves (or parts of stacked leaves) that no rule fills or that two fill. Values are
    looked at only once the headers are in order.
    """
    problems = [
        *folder.problems,
        *_leaf_problems(abstract, rules),
        *_name_problems(rules, folder, ignore),
        *_header_problems(abstract, rules, folder),
    ]
    raise_problems(problems, folder.path)

    by_name: dict[str, list[WeightRule]] = defaultdict(list)
    for rule in rules:
        by_name[rule.name].append(rule)
    leaves: Leaves = {}
    for info in sorted((folder.tensors[name] for name in by_name), key=lambda info: (info.file, info.offset)):
        tensor = folder.read(info.name)
        for rule in by_name[info.name]:
            spec = abstract[rule.path]
            try:
                value = _place(_prepare(tensor, rule, spec), spec, rule.index)
            except _UnfitError as error:
                problems.append(f"{info.file.name}: {error}")
                continue
            leaf = leaves.pop(rule.path, None)
            if leaf is None:
                leaf = zeros(spec.shape, spec.dtype, _working_place(spec))
            leaves[rule.path], finite = _writer(_working_place(spec))(leaf, value, rule.index)
            del leaf, value
            _settle(leaves[rule.path])
            if check_finite and not finite:
                problems.append(f"{info.file.name}: {rule.name!r}: expected finite values of {spec.dtype}")
        del tensor
    raise_problems(problems, folder.path)
    # The same buffers under the sharding that was asked for.
    return {path: jax.device_put(leaf, abstract[path].sharding) for path, leaf in leaves.items()}


# Problems that rules and headers show


def _leaf_problems(abstract: Mapping[LeafPath, jax.ShapeDtypeStruct], rules: Sequence[WeightRule]) -> list[str]:
    problems = []
    indices: dict[LeafPath, list[tuple[int, ...]]] = {path: [] for path in abstract}
    for rule in rules:
        if rule.path in indices:
            indices[rule.path].append(rule.index)
        else:
            problems.append(
                f"{rule.name!r}: its rule names the leaf {show_path(rule.path)}, which the model doesn't have"
            )
    for path, found in indices.items():
        shape = abstract[path].shape
        depths = {len(index) for index in found}
        if len(depths) > 1 or max(depths, default=0) > len(shape):
            problems.append(
                f"leaf {show_path(path)} of shape {shape}: its rules have indices of lengths {sorted(depths)}"
            )
            continue
        wanted = list(itertools.product(*map(range, shape[: max(depths, default=0)])))
        missing = sorted(set(wanted) - set(found))
        outside = sorted(set(found) - set(wanted))
        twice = sorted(index for index, count in Counter(found).items() if count > 1)
        for indices_at_fault, fault in ((missing, "no rule fills"), (outside, "outside it"), (twice, "filled twice")):
            if indices_at_fault:
                at = "" if indices_at_fault == [()] else f" at {_show_some(indices_at_fault)}"
                problems.append(f"leaf {show_path(path)} of shape {shape}: {fault}{at}")
    return problems


def _name_problems(rules: Sequence[WeightRule], folder: TensorSource, ignore: Iterable[str]) -> list[str]:
    known = {rule.name for rule in rules}
    ignored = [re.compile(pattern) for pattern in ignore]
    missing = [f"{name!r}: missing" for name in sorted(known - folder.tensors.keys())]
    unknown = [
        f"{folder.tensors[name].file.name}: {name!r}: unknown, no rule maps it"
        for name in sorted(folder.tensors.keys() - known)
        if not any(pattern.fullmatch(name) for pattern in ignored)
    ]
    return missing + unknown


def _header_problems(
    abstract: Mapping[LeafPath, jax.ShapeDtypeStruct], rules: Sequence[WeightRule], folder: TensorSource
) -> list[str]:
    problems = []
    for rule in rules:
        if rule.name not in folder.tensors or rule.path not in abstract:
            continue
        info, spec = folder.tensors[rule.name], abstract[rule.path]
        expected = _published_shape(rule, spec)
        if expected is not None and info.shape != expected:
            problems.append(f"{_describe(info)}: expected shape {expected}, found {info.shape}")
        if rule.convert is None and dtype_kind(info.dtype) != dtype_kind(spec.dtype):
            problems.append(f"{_describe(info)}: expected a kind of {dtype_kind(spec.dtype)}, found {info.dtype}")
    return problems


def _published_shape(rule: WeightRule, spec: jax.ShapeDtypeStruct) -> tuple[int, ...] | None:
    if rule.shape is not None:
        return rule.shape
    return None if rule.convert else spec.shape[len(rule.index) :]


def _describe(info: TensorInfo) -> str:
    return f"{info.file.name}: {info.name!r}"


def _show_some(indices: Sequence[tuple[int, ...]], limit: int = 5) -> str:
    shown = ", ".join(str(index) for index in indices[:limit])
    return shown if len(indices) <= limit else f"{shown} and {len(indices) - limit} more"


# One tensor's way from file to leaf


class _UnfitError(Exception):
    """A tensor that doesn't fit its leaf, found out only from its values."""


def _prepare(
    value: Shaped[np.ndarray, "..."], rule: WeightRule, spec: jax.ShapeDtypeStruct
) -> Shaped[np.ndarray, "..."]:
    """The tensor on the host, in the shape of the place it fills, in a dtype that the device holds exactly."""
    if rule.convert is not None:
        value = rule.convert(value)
    place = spec.shape[len(rule.index) :]
    if value.shape != place and (rule.shape is None or value.size != np.prod(place, dtype=int)):
        raise _UnfitError(f"{rule.name!r}: expected shape {place} once converted, got {value.shape}")
    if dtype_kind(value.dtype) != dtype_kind(spec.dtype):
        raise _UnfitError(
            f"{rule.name!r}: expected a kind of {dtype_kind(spec.dtype)} once converted, got {value.dtype}"
        )
    if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        # 64 bits on a device of 32: cast here, since the transfer would cut integers without a word.
        cast = value.astype(spec.dtype)
        if dtype_kind(value.dtype) == "integer" and not np.array_equal(cast, value):
            raise _UnfitError(f"{rule.name!r}: expected values that fit {spec.dtype}, found {value.dtype} beyond it")
        value = cast
    return value.reshape(place)


def _place(
    value: Shaped[np.ndarray, "..."], spec: jax.ShapeDtypeStruct, index: tuple[int, ...]
) -> Shaped[Array, "..."]:
    """The tensor on its devices, split as the trailing dimensions of its leaf are."""
    sharding = _working_sharding(spec.sharding, len(index))
    if sharding is None:
        return jax.device_put(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda where: value[where])


def _working_sharding(sharding: Sharding | None, dropped: int = 0) -> Sharding | None:
    """The sharding without its `dropped` leading dimensions, on a mesh whose axes the compiler may use as it likes.

    On a mesh of explicit axes a slice could not be written into a leaf that is split along its stacked dimensions.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return NamedSharding(mesh, PartitionSpec(*sharding.spec[dropped:]), memory_kind=sharding.memory_kind)


def _working_place(spec: jax.ShapeDtypeStruct) -> Sharding | Format | None:
    """Where a leaf lies while it is filled."""
    where = _working_sharding(spec.sharding)
    return Format(spec.format.layout, where) if spec.format.layout else where


@functools.cache
def _writer(place: Sharding | Format | None):
    """`_write` as a program, for leaves that lie there."""
    return jax.jit(_write, donate_argnums=0, out_shardings=(place, None))


def _write(
    leaf: Shaped[Array, "..."], value: Shaped[Array, "..."], index: tuple[int, ...]
) -> tuple[Shaped[Array, "..."], Bool[Array, ""]]:
    """The leaf with `value`, cast, at `index` of its leading dimensions; and whether the cast value is all finite."""
    cast = value.astype(leaf.dtype)
    block = jax.lax.expand_dims(cast, range(len(index)))
    start = (*index, *(0,) * cast.ndim)
    return jax.lax.dynamic_update_slice(leaf, block, start), jnp.isfinite(cast).all()


def _settle(leaf: Shaped[Array, "..."]) -> None:
    """Wait until the leaf is written and let go of what it was written from.

    Dispatch is asynchronous, so without the wait tensors would queue up on the host. The runtime drops its reference
    to a host buffer on a thread of its own and leaves the buffer to the next garbage collection, of any generation.
    """
    leaf.block_until_ready()
    gc.collect(0)
