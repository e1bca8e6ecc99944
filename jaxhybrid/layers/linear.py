"""Matrix products with weights kept as published: [out, in]."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxhybrid.layers.parameter import parameter
from pallas_kernels.partition import Axes, split
from pallas_kernels.registry import current_platform

# Rows up to which XLA:CPU multiplies W X^T faster than X W^T: half the time at 2 to 16 rows, level at 512.
MAX_COLUMNS = 256


def project(x: Float[Array, "*batch features"], weight: Float[Array, "out features"]) -> Float[Array, "*batch out"]:
    """x W^T. Leading dimensions are flattened: a single row then takes XLA:CPU's fast matrix-vector path."""
    rows = x.reshape(-1, x.shape[-1])
    if 1 < rows.shape[0] <= MAX_COLUMNS and current_platform() == "cpu":
        # The barrier keeps XLA from turning the product around again.
        out = jax.lax.optimization_barrier(jnp.einsum("oi,ni->on", weight, rows)).T
    else:
        out = jnp.einsum("ni,oi->no", rows, weight)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def scaled(x: Float[Array, "*batch"], scale: float) -> Float[Array, "*batch"]:
    """x times a factor of its spec, or x itself."""
    return x if scale == 1.0 else x * scale


class Linear(nnx.Module):
    """y = W x, or W x + b with a `bias`."""

    def __init__(
        self, features: int, out: int, axes: tuple[str | None, str | None], dtype: DTypeLike, bias: bool = False
    ) -> None:
        self.weight = parameter((out, features), axes, dtype)
        self.bias = parameter((out,), axes[:1], dtype) if bias else None

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch out"]:
        out = project(x, self.weight[...])
        return out if self.bias is None else out + self.bias[...]


class StackedLinear(nnx.Module):
    """Several projections of one input as one product: y[n] = W[n] x, or W[n] x + b[n] with a `bias`."""

    def __init__(
        self, count: int, features: int, out: int, out_axis: str, dtype: DTypeLike, bias: bool = False
    ) -> None:
        self.weight = parameter((count, out, features), (None, out_axis, None), dtype)
        self.bias = parameter((count, out), (None, out_axis), dtype) if bias else None
        self.out_axis = out_axis

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch count out"]:
        result = "rows " + "_ " * (x.ndim - 1) + self.out_axis
        out = split(_project_stack, Axes(("rows", f"_ {self.out_axis}"), (result,)))(x, self.weight[...])
        return out if self.bias is None else out + self.bias[...]


def _project_stack(
    x: Float[Array, "*batch features"], weight: Float[Array, "count out features"]
) -> Float[Array, "*batch count out"]:
    count, out, features = weight.shape
    # As one matrix: a product over the stack makes XLA:CPU transpose all of it at every call.
    return project(x, weight.reshape(-1, features)).reshape(*x.shape[:-1], count, out)
