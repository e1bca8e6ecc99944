"""The gated delta rule, one token at a time in float32: the definition that the fast forms are tested against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.padding import masked


def gated_delta(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "L N Hv dk dv"]]:
    """Arguments and result as in `pallas_kernels.gated_delta.gated_delta`."""

    def counted_step(carry, token):
        number, S, kept = carry
        S, (out, *_) = step(S, token)
        if checkpoint_lengths is not None:
            kept = jnp.where((checkpoint_lengths == number + 1)[..., None, None, None], S[:, None], kept)
        return (number + 1, S, kept), out

    tokens = [x.swapaxes(0, 1) for x in masked(lengths, q, k, v, log_decay, beta)]
    S = state[layer, read_slots].astype(jnp.float32)
    kept = None if checkpoint_slots is None else state[layer, checkpoint_slots].astype(jnp.float32)
    (_, S, kept), out = jax.lax.scan(counted_step, (0, S, kept), tuple(tokens))
    state = state.at[layer, write_slots].set(S.astype(state.dtype))
    if kept is not None:
        state = state.at[layer, checkpoint_slots].set(kept.astype(state.dtype))
    return out.swapaxes(0, 1), state


def step(S: Float[Array, "B Hv dk dv"], token: tuple[Array, ...]):
    """One token, q, k, v, log_decay and beta without their axis of tokens, all float32.

    Returns the next state, and the output with the token's record: k normalised, u, log_decay.
    """
    q, k, v, log_decay, beta = token
    groups = v.shape[1] // k.shape[1]

    def l2(x):
        return x / jnp.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)

    key, record_decay = l2(k), log_decay
    if log_decay.ndim == 2:
        log_decay = log_decay[..., None]
    q = jnp.repeat(l2(q) * q.shape[-1] ** -0.5, groups, axis=1)
    k = jnp.repeat(key, groups, axis=1)
    S = jnp.exp(log_decay)[..., None] * S
    u = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", S, k, precision="highest"))
    S = S + k[..., None] * u[..., None, :]
    return S, (jnp.einsum("bhkv,bhk->bhv", S, q, precision="highest"), key, u, record_decay)
