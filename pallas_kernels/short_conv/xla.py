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
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
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
    def last(row, length):
        return jax.lax.dynamic_slice_in_dim(window[row], length, width - 1)

    if checkpoint_lengths is not None and checkpoint_slots is not None:
        count, kept_lengths, kept_slots = (
            checkpoint_lengths.shape[1],
            checkpoint_lengths.ravel(),
            checkpoint_slots.ravel(),
        )
        # A checkpoint that is none keeps what the null slot holds.
        before = slots.read(state, layer, kept_slots).astype(jnp.float32)
        state = slots.write(
            state, layer, kept_slots,
            lambda n: jnp.where(kept_lengths[n] > 0, last(n // count, kept_lengths[n]), before[n]),
        )  # fmt: skip
    return jax.nn.silu(y).astype(x.dtype), slots.write(state, layer, write_slots, lambda row: last(row, lengths[row]))
