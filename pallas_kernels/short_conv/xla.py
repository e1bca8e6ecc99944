"""Causal depthwise convolution with state, as K shifted products that XLA fuses into one pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import slots


def short_conv(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C K"],
    state: Float[Array, "L N K-1 C"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    bias: Float[Array, " C"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "L N K-1 C"]]:
    """Arguments and result as in `pallas_kernels.short_conv.short_conv`."""
    tokens, width = x.shape[1], weight.shape[1]
    valid = jnp.arange(tokens)[None, :, None] < lengths[:, None, None]
    x_valid = jnp.where(valid, x, 0).astype(jnp.float32)
    window = jnp.concatenate([slots.read(state, layer, read_slots).astype(jnp.float32), x_valid], axis=1)
    taps = weight.T.astype(jnp.float32)
    y = sum(window[:, j : j + tokens] * taps[j] for j in range(width))
    if bias is not None:
        y = y + bias.astype(jnp.float32)

    # After n valid tokens the last K-1 inputs start at row n of the window: nothing moves when n is 0.
    def last(row):
        return jax.lax.dynamic_slice_in_dim(window[row], lengths[row], width - 1)

    return jax.nn.silu(y).astype(x.dtype), slots.write(state, layer, write_slots, last)
