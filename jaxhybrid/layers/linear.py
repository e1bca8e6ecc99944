"""Matrix products with weights kept as published: [out, in]."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxhybrid.layers.parameter import parameter


def project(x: Float[Array, "*batch features"], weight: Float[Array, "out features"]) -> Float[Array, "*batch out"]:
    """x W^T. Leading dimensions are flattened: a single row then takes XLA:CPU's fast matrix-vector path."""
    rows = x.reshape(-1, x.shape[-1])
    return jnp.einsum("ni,oi->no", rows, weight).reshape(*x.shape[:-1], weight.shape[0])


class Linear(nnx.Module):
    """y = W x, without bias."""

    def __init__(self, features: int, out: int, axes: tuple[str | None, str | None], dtype: DTypeLike) -> None:
        self.weight = parameter((out, features), axes, dtype)

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch out"]:
        return project(x, self.weight[...])


class StackedLinear(nnx.Module):
    """Several projections of one input as one product: y[n] = W[n] x."""

    def __init__(self, count: int, features: int, out: int, out_axis: str | None, dtype: DTypeLike) -> None:
        self.weight = parameter((count, out, features), (None, out_axis, None), dtype)

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch count out"]:
        rows = x.reshape(-1, x.shape[-1])
        count, out, _ = self.weight.shape
        return jnp.einsum("ni,coi->nco", rows, self.weight[...]).reshape(*x.shape[:-1], count, out)
