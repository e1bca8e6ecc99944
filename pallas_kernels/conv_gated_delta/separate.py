"""Short convolution, and then the gated delta rule."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def conv_gated_delta(
    convolve: Callable[..., tuple[Array, Array]],
    recur: Callable[..., tuple[Array, Array]],
    inputs: Float[Array, "B T C"] | Float[Array, "B T 3 W"],
    filters: Float[Array, "C K"] | Float[Array, "3 W K"],
    conv_states: tuple[Float[Array, "L N K-1 _"], ...],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    *slots: Any,
    **checkpoints: Int[Array, "B M"],
) -> tuple[Float[Array, "B T Hv dv"], tuple[Float[Array, "L N K-1 _"], ...], Float[Array, "L N Hv dk dv"]]:
    """By forms of `short_conv` and `gated_delta`; the rest as in `pallas_kernels.conv_gated_delta.conv_gated_delta`."""
    batch, tokens = beta.shape[:2]
    key_dim, value_dim = state.shape[3:]
    convolved, changed = [], []
    for place, conv_state in enumerate(conv_states):
        x, weight = (inputs[:, :, place], filters[place]) if inputs.ndim == 4 else (inputs, filters)
        y, conv_state = convolve(x, weight, conv_state, *slots, **checkpoints)
        convolved.append(y)
        changed.append(conv_state)
    if len(convolved) == 1:
        by_head = convolved[0].reshape(batch, tokens, key_heads(inputs, state), -1)
        convolved = jnp.split(by_head, (key_dim, 2 * key_dim), axis=-1)
    q, k, v = (
        x.reshape(batch, tokens, -1, dim) for x, dim in zip(convolved, (key_dim, key_dim, value_dim), strict=True)
    )
    out, state = recur(q, k, v, log_decay, beta, state, *slots, **checkpoints)
    return out.astype(inputs.dtype), tuple(changed), state


def key_heads(inputs: Float[Array, "B T C"] | Float[Array, "B T 3 W"], state: Float[Array, "L N Hv dk dv"]) -> int:
    """How many there are: a value head has a value of its own, a key head q and k."""
    value_heads, key_dim, value_dim = state.shape[2:]
    if inputs.ndim == 4:
        return inputs.shape[3] // key_dim
    return (inputs.shape[2] - value_heads * value_dim) // (2 * key_dim)
