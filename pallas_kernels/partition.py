"""Operators on a mesh: each device runs an operator's ordinary implementation on its own heads.

Inside `partitioned`, `split` runs a function under `shard_map`, by the logical names of its arguments' dimensions. So
kernels that no compiler can take apart run on a mesh, state is neither gathered nor moved, and what an implementation
sees (and may refuse) is what one device holds.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped


@dataclass(frozen=True)
class Partition:
    """A mesh whose axes the compiler may use as it likes, and the mesh axes of each logical name that is split."""

    mesh: Mesh
    axes: tuple[tuple[str, tuple[str, ...]], ...]

    def of(self, name: str | None) -> tuple[str, ...]:
        """The mesh axes that a logical one is split over; none if it isn't."""
        return dict(self.axes).get(name or "", ())

    def size(self, name: str) -> int:
        """Shards along a logical axis."""
        return math.prod(self.mesh.shape[axis] for axis in self.of(name))

    def spec(self, names: tuple[str | None, ...]) -> PartitionSpec:
        """The mesh axes of each dimension, from its logical name."""
        return PartitionSpec(*(self.of(name) or None for name in names))

    def sharding(self, names: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Of an array; a dimension that doesn't divide by its mesh axes is held whole by every device."""
        fits = (size % self.size(name) == 0 if name else False for name, size in zip(names, shape, strict=False))
        return NamedSharding(
            self.mesh, self.spec(tuple(name if fit else None for name, fit in zip(names, fits, strict=False)))
        )

    def without(self, names: set[str], axis: str | None = None) -> "Partition":
        """The same, with these logical axes not split, or not over that axis of the mesh."""

        def left(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
            return axes if name not in names else tuple(own for own in axes if axis not in (None, own))

        return Partition(self.mesh, tuple((name, left(name, axes)) for name, axes in self.axes))


_partition: Any = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def partitioned(partition: Partition | None) -> Iterator[None]:
    """Programs traced in this block run on the partition's mesh; None is one device. Part of JAX's cache key."""
    with _partition(partition):
        yield


def current() -> Partition | None:
    """The partition of the innermost `partitioned` block."""
    return _partition.value


@dataclass(frozen=True)
class Axes:
    """Logical names of the dimensions of an operator's arguments and results, such as `"_ _ heads _"`.

    `_` is a dimension that is never split; dimensions after the last one named are not either. `arguments` by
    position, `options` by name; those that have no entry are not split.
    """

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    options: Mapping[str, str] | None = None


def names_of(text: str) -> tuple[str | None, ...]:
    """`"_ heads"` as (None, "heads")."""
    return tuple(None if name == "_" else name for name in text.split())


def split(function: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """`function` on each device's part of its array arguments; without a partition, `function` itself.

    A logical axis is split only if all dimensions of that name divide by the mesh axis; otherwise every device does
    all of it.
    """
    partition = current()
    if partition is None:
        return function

    def run(*arguments: Any, **options: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(arguments)), **options}
        names: dict[Any, str] = {**dict(enumerate(axes.arguments)), **(axes.options or {})}
        arrays = {key: value for key, value in given.items() if _is_array(value)}
        named = {key: names_of(names.get(key, "")) for key in arrays}
        fitting = partition.without(_undivided(partition, arrays, named))

        def local(*parts: Any) -> Any:
            own = {**given, **dict(zip(arrays, parts, strict=True))}
            with partitioned(None):
                return function(
                    *(own[place] for place in range(len(arguments))), **{name: own[name] for name in options}
                )

        results = tuple(fitting.spec(names_of(text)) for text in axes.results)
        return jax.shard_map(
            local,
            mesh=partition.mesh,
            in_specs=tuple(fitting.spec(named[key]) for key in arrays),
            out_specs=results if len(results) > 1 else results[0],
            check_vma=False,
        )(*arrays.values())

    return run


def constrain(x: Shaped[Array, "..."], axes: str) -> Shaped[Array, "..."]:
    """`x`, split by these logical names wherever their dimensions divide; without a partition, `x` itself."""
    partition = current()
    if partition is None:
        return x
    return jax.lax.with_sharding_constraint(x, partition.sharding(names_of(axes), x.shape))


def own_heads(x: Shaped[Array, "..."], dimension: int) -> Shaped[Array, "..."]:
    """`x` with each of its heads repeated as often as it takes for them to divide by the shards."""
    partition = current()
    shards, heads = 1 if partition is None else partition.size("heads"), x.shape[dimension]
    return x if heads % shards == 0 else jnp.repeat(x, math.lcm(heads, shards) // heads, axis=dimension)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _undivided(
    partition: Partition, arrays: Mapping[Any, Any], named: Mapping[Any, tuple[str | None, ...]]
) -> set[str]:
    return {
        name
        for key, value in arrays.items()
        for size, name in zip(value.shape, named[key], strict=False)
        if name and size % partition.size(name)
    }
