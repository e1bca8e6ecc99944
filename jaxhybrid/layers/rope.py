"""Rotary position embedding (arXiv 2104.09864), rotating the two halves of the first `rotary_dim` channels."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxhybrid.config import RopeSpec


def rotate(x: Float[Array, "B T H d"], positions: Int[Array, "B T"], rope: RopeSpec) -> Float[Array, "B T H d"]:
    """Rotates channel pairs (i, i + rotary_dim / 2) by position * theta^(-2 i / rotary_dim)."""
    half = rope.rotary_dim // 2
    frequencies = rope.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return rotated.astype(x.dtype)
