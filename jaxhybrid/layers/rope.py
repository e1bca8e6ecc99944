"""Rotary position embedding (arXiv 2104.09864) over the first `rotary_dim` channels of a head, and its scalings.

A scaling stretches a model's positions beyond those it was trained on. All but one change the frequencies by the
config alone. Dynamic NTK scaling raises them with the length: here position p turns by the frequencies of a sequence
of p + 1 tokens, so that a key depends on nothing after it and may lie in a cache. That is what the reference does when
it decodes token by token; a reference run over a whole prompt at once uses the last position's frequencies for all.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jaxhybrid.config import DynamicScaling, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling


def rotate(
    x: Float[Array, "B T H d"], positions: Int[Array, "B T"] | Int[Array, "3 B T"], rope: RopeSpec
) -> Float[Array, "B T H d"]:
    """Turns channel pair i by position * frequency i, in float32, and multiplies it by the attention factor.

    Pairs are (i, i + rotary_dim / 2), or (2 i, 2 i + 1) if `rope.interleaved`. Other channels are left alone. With
    `rope.sections` positions may be three, of time, height and width: each pair turns by one of them.
    """
    angles = _angles(positions, rope)[:, :, None]
    factor = attention_factor(rope)
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    wide = x.astype(jnp.float32)
    turned, rest = wide[..., : rope.rotary_dim], wide[..., rope.rotary_dim :]
    if rope.interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    pairs = first * cos - second * sin, second * cos + first * sin
    turned = jnp.stack(pairs, -1).reshape(turned.shape) if rope.interleaved else jnp.concatenate(pairs, -1)
    return jnp.concatenate([turned, rest], axis=-1).astype(x.dtype)


def frequencies(rope: RopeSpec) -> Float32[np.ndarray, " half"]:
    """Radians per position of each pair: theta^(-2 i / rotary_dim), scaled; unscaled where the scaling is dynamic."""
    half = rope.rotary_dim // 2
    plain = rope.theta ** (-np.arange(half) / half)
    match rope.scaling:
        case LinearScaling(factor=factor):
            plain = plain / factor
        case Llama3Scaling() as scaling:
            plain = _llama3(plain, scaling)
        case YarnScaling() as scaling:
            plain = _yarn(plain, rope, scaling)
    return plain.astype(np.float32)


def axis_of_pair(rope: RopeSpec) -> Int[np.ndarray, " half"]:
    """Which of time (0), height (1) and width (2) each pair turns by: in turn, and time once a section is used up."""
    assert rope.sections is not None
    pairs = np.arange(rope.rotary_dim // 2)
    axis = pairs % 3
    return np.where(pairs < 3 * np.array(rope.sections)[axis], axis, 0)


def attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied by: 1 except for YaRN (arXiv 2309.00071, equation 22)."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1: how much sharper attention has to be over a context longer by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _angles(positions: Int[Array, "B T"] | Int[Array, "3 B T"], rope: RopeSpec) -> Float[Array, "B T half"]:
    turns = jnp.asarray(frequencies(rope))
    if positions.ndim == 3:
        return jnp.moveaxis(positions[axis_of_pair(rope)], 0, -1).astype(jnp.float32) * turns
    if isinstance(rope.scaling, DynamicScaling):
        factor, trained = rope.scaling.factor, rope.scaling.original_max_position_embeddings
        growth = factor * jnp.maximum(positions + 1, trained) / trained - (factor - 1)
        # theta times growth^(d / (d - 2)), taken to the power of -2 i / d.
        turns = turns * growth[..., None] ** (-2 * jnp.arange(turns.size) / (rope.rotary_dim - 2))
    return positions.astype(jnp.float32)[..., None] * turns


def _llama3(plain: Float[np.ndarray, " half"], scaling: Llama3Scaling) -> Float[np.ndarray, " half"]:
    """Waves that fit `high_freq_factor` times into the trained context stay, those that fit less than
    `low_freq_factor` times are stretched by `factor`, and between the two goes a blend."""
    turns = scaling.original_max_position_embeddings * plain / (2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def _yarn(plain: Float[np.ndarray, " half"], rope: RopeSpec, scaling: YarnScaling) -> Float[np.ndarray, " half"]:
    """NTK by parts (arXiv 2309.00071, section 3.2), the ramp over pair numbers as published checkpoints use it."""

    def pair(turns: float) -> float:
        """The (fractional) pair that turns so often within the trained context."""
        length = scaling.original_max_position_embeddings
        return rope.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    high += 0.001 if low == high else 0
    stretched = np.clip((np.arange(plain.size) - low) / (high - low), 0, 1)
    return plain * (1 - stretched + stretched / scaling.factor)
