"""How a layer declares a parameter: shape, dtype and the logical name of every axis; and how layers are stacked."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class WholeParam(nnx.Param):
    """A parameter that a scan over layers leaves whole: the operator that takes it picks the layer, and copies none."""


def parameter(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: DTypeLike, whole: bool = False) -> nnx.Param:
    """A zero parameter to be filled from a checkpoint.

    `axes` names each dimension (`heads`, `kv_heads`, `experts`, `mlp`, `vocab`, ... or None for one that is never
    split), so that one table can map the names to the axes of a mesh. `whole`: it becomes a `WholeParam`.
    """
    if len(shape) != len(axes):
        raise ValueError(f"{shape=} has {len(shape)} dimensions but {axes=} names {len(axes)}")
    return (WholeParam if whole else nnx.Param)(jnp.zeros(shape, dtype), axes=axes)


M = TypeVar("M", bound=nnx.Module)


def with_leading_axis(module: M, count: int) -> M:
    """The module with `count` copies' room in every parameter, along a new first axis, for a scan over them."""
    graph, parameters = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), parameters))
