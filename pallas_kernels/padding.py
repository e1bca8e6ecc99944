"""Steps of a batch that are padding: whatever they hold, NaN included, is to reach nothing."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def token_mask(lengths: Int[Array, "B"], tokens: int) -> Bool[Array, "B T"]:
    """Which of the T padded steps of each sequence are real."""
    return jnp.arange(tokens) < lengths[:, None]


def zero_padding(rows: Float[Array, "B T *row"], lengths: Int[Array, "B"]) -> Float[Array, "B T *row"]:
    """The rows with padded steps set to 0, whatever they held."""
    real = token_mask(lengths, rows.shape[1])
    return jnp.where(real.reshape(*real.shape, *[1] * (rows.ndim - 2)), rows, 0)


def masked(lengths: Int[Array, " B"], *arrays: Float[Array, "B T ..."]) -> list[Float[Array, "B T ..."]]:
    """In float32, with padded steps set to 0: of a recurrence, they then neither decay nor update."""
    return [zero_padding(x, lengths).astype(jnp.float32) for x in arrays]
