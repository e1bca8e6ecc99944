"""Root-mean-square (arXiv 1910.07467) and layer normalisation (1607.06450), computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxhybrid.layers.parameter import parameter


def rms_norm(
    x: Float[Array, "*batch features"], weight: Float[Array, " features"], eps: float
) -> Float[Array, "*batch features"]:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 and cast back to x's dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


class RmsNorm(nnx.Module):
    """`zero_centred` norms store w - 1."""

    def __init__(self, features: int, eps: float, dtype: DTypeLike, zero_centred: bool = False) -> None:
        self.weight = parameter((features,), (None,), dtype)
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        weight = self.weight[...]
        return rms_norm(x, 1.0 + weight.astype(jnp.float32) if self.zero_centred else weight, self.eps)


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
