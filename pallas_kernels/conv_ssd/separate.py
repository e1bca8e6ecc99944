"""Short convolutions, and then Mamba-2's recurrence."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.partition import own_heads


def conv_ssd(
    convolve: Callable[..., tuple[Array, Array]],
    recur: Callable[..., tuple[Array, Array]],
    inputs: tuple[Float[Array, "B T H*P"], Float[Array, "B T 2*G*N"]],
    filters: tuple[Float[Array, "_ K"], ...],
    biases: tuple[Float[Array, " _"], ...] | None,
    conv_states: tuple[Float[Array, "L S K-1 _"], ...],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    *slots: Any,
    **checkpoints: Int[Array, "B M"],
) -> tuple[Float[Array, "B T H P"], tuple[Float[Array, "L S K-1 _"], ...], Float[Array, "L S H P N"]]:
    """By forms of `short_conv` and `ssd`; `convolve` takes last what its channels go by on a mesh. The rest as in
    `pallas_kernels.conv_ssd.conv_ssd`."""
    x_bias, bc_bias = biases or (None, None)
    (x, bc), (x_filter, bc_filter), (conv_x, conv_bc) = inputs, filters, conv_states
    values, conv_x = convolve("heads", x, x_filter, conv_x, *slots, x_bias, **checkpoints)
    shared, conv_bc = convolve("_", bc, bc_filter, conv_bc, *slots, bc_bias, **checkpoints)
    heads, head_dim, width = state.shape[2:]
    rows, tokens = x.shape[:2]
    B, C = jnp.moveaxis(shared.reshape(rows, tokens, 2, -1, width), 2, 0)
    values = values.reshape(rows, tokens, heads, head_dim)
    out, state = recur(values, dt, A, own_heads(B, 2), own_heads(C, 2), D, state, *slots, **checkpoints)
    return out.astype(x.dtype), (conv_x, conv_bc), state
