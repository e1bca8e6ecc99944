"""Root-mean-square (arXiv 1910.07467) and layer normalisation (1607.06450), computed in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxhybrid.layers.parameter import parameter
from pallas_kernels.partition import Axes, current, split
from pallas_kernels.registry import current_platform


def rms_norm(
    x: Float[Array, "*batch features"], weight: Float[Array, " features"], eps: float
) -> Float[Array, "*batch features"]:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 and cast back to x's dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def rms_norm_by_group(
    x: Float[Array, "B T G features"], weight: Float[Array, "G features"], eps: float
) -> Float[Array, "B T G*features"]:
    """`rms_norm` of each group by itself, side by side. Of one token there is too little for its layout to matter."""
    partition = current()
    if current_platform() != "tpu" or x.shape[1] == 1 or (partition and x.shape[2] % partition.size("heads")):
        return rms_norm(x, weight, eps).reshape(*x.shape[:2], -1)
    return split(partial(_side_by_side, eps), Axes(("_ _ heads", "heads"), ("_ _ heads",)))(x, weight)


def _side_by_side(
    eps: float, x: Float[Array, "B T G features"], weight: Float[Array, "G features"]
) -> Float[Array, "B T G*features"]:
    """Sums over a group, and its scale spread over its features, are products with a 0/1 matrix.

    As an array of groups a TPU would lay x out anew, twice.
    """
    groups, features = weight.shape
    member = np.repeat(np.eye(groups, dtype=np.float32), features, axis=0)
    wide = x.reshape(*x.shape[:2], -1).astype(jnp.float32)
    sums = jnp.einsum("btw,wg->btg", wide * wide, member, precision="highest")
    scale = jnp.einsum("btg,wg->btw", jax.lax.rsqrt(sums / features + eps), member, precision="highest")
    return (wide * scale * weight.astype(jnp.float32).ravel()).astype(x.dtype)


class RmsNorm(nnx.Module):
    """`zero_centred` norms store w - 1."""

    def __init__(self, features: int, eps: float, dtype: DTypeLike, zero_centred: bool = False) -> None:
        self.weight = parameter((features,), (None,), dtype)
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        return rms_norm(x, self._factors(), self.eps)

    def by_head(self, x: Float[Array, "B T H features"]) -> Float[Array, "B T H*features"]:
        """Of each head by itself, side by side."""
        return rms_norm_by_group(x, jnp.broadcast_to(self._factors(), x.shape[2:]), self.eps)

    def _factors(self) -> Float[Array, " features"]:
        weight = self.weight[...]
        return 1.0 + weight.astype(jnp.float32) if self.zero_centred else weight


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    def __init__(self, features: int, eps: float, dtype: DTypeLike) -> None:
        self.weight = parameter((features,), (None,), dtype)
        self.bias = parameter((features,), (None,), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        weight, bias = self.weight[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (centred * scale * weight + bias).astype(x.dtype)
