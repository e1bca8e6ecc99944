"""Causal depthwise convolution with state, one token at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
    """y_t = silu(bias + sum_j w_j x_{t-K+1+j}); arguments as in `pallas_kernels.short_conv.short_conv`."""
    taps = weight.T.astype(jnp.float32)
    offset = 0.0 if bias is None else bias.astype(jnp.float32)

    def step(carry, token):
        number, past, kept = carry
        x_t, valid = token
        valid = valid[:, None]
        window = jnp.concatenate([past, jnp.where(valid, x_t, 0)[:, None]], axis=1)
        y_t = jax.nn.silu((window * taps).sum(axis=1) + offset)
        past = jnp.where(valid[..., None], window[:, 1:], past)
        if checkpoint_lengths is not None:
            kept = jnp.where((checkpoint_lengths == number + 1)[..., None, None], past[:, None], kept)
        return (number + 1, past, kept), y_t

    valid = jnp.arange(x.shape[1])[:, None] < lengths
    past = state[layer, read_slots].astype(jnp.float32)
    kept = None if checkpoint_slots is None else state[layer, checkpoint_slots].astype(jnp.float32)
    (_, past, kept), y = jax.lax.scan(step, (0, past, kept), (x.swapaxes(0, 1).astype(jnp.float32), valid))
    state = state.at[layer, write_slots].set(past.astype(state.dtype))
    if kept is not None:
        state = state.at[layer, checkpoint_slots].set(kept.astype(state.dtype))
    return y.swapaxes(0, 1).astype(x.dtype), state
