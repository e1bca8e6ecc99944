"""The gated delta rule's forms on update records, one token at a time in float32: what fast ones are tested against.

Arguments and results are those of the public functions, records taken apart into k, u and log_decay.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.reference import step
from pallas_kernels.padding import masked


def verify(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Array, Array, Array, Array]:
    """As `pallas_kernels.gated_delta.verify.verify`."""
    tokens = [x.swapaxes(0, 1) for x in masked(lengths, q, k, v, log_decay, beta)]
    _, (out, *records) = jax.lax.scan(step, state[layer, read_slots].astype(jnp.float32), tuple(tokens))
    out, k, u, log_decay = (x.swapaxes(0, 1) for x in (out, *records))
    return out, k, u, log_decay


def apply(
    S: Float[Array, "B Hv dk dv"],
    k: Float[Array, "B T Hk dk"],
    u: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    counts: Int[Array, " B"],
) -> Float[Array, "B Hv dk dv"]:
    """The states after the first counts[b] records of each row."""
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]

    def update(S, record):
        k, u, g = record
        k = jnp.repeat(k, u.shape[1] // k.shape[1], axis=1)
        return jnp.exp(g)[..., None] * S + k[..., None] * u[..., None, :], None

    return jax.lax.scan(update, S, tuple(x.swapaxes(0, 1) for x in masked(counts, k, u, log_decay)))[0]


def replay(
    k: Float[Array, "B T Hk dk"],
    u: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    accepted: Int[Array, " B"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
) -> Float[Array, "L N Hv dk dv"]:
    """As `pallas_kernels.gated_delta.replay.replay`."""
    S = apply(state[layer, read_slots].astype(jnp.float32), k, u, log_decay, accepted)
    return state.at[layer, write_slots].set(S.astype(state.dtype))


def buffered(
    q: Float[Array, "B 1 Hk dk"],
    k: Float[Array, "B 1 Hk dk"],
    v: Float[Array, "B 1 Hv dv"],
    log_decay: Float[Array, "B 1 Hv"] | Float[Array, "B 1 Hv dk"],
    beta: Float[Array, "B 1 Hv"],
    state: Float[Array, "L N Hv dk dv"],
    ring_k: Float[Array, "L N W Hk dk"],
    ring_u: Float[Array, "L N W Hv dv"],
    ring_log_decay: Float[Array, "L N W Hv"] | Float[Array, "L N W Hv dk"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    cursors: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Array, Array, Array, Array, Array]:
    """As `pallas_kernels.gated_delta.buffered.buffered`."""
    checkpoint = state[layer, read_slots]
    old_k, old_u, old_log_decay = (ring[layer, read_slots] for ring in (ring_k, ring_u, ring_log_decay))
    size, rows = ring_k.shape[2], jnp.arange(len(cursors))
    S = apply(checkpoint.astype(jnp.float32), old_k, old_u, old_log_decay, cursors)
    S, (out, *record) = step(S, tuple(x[:, 0] for x in masked(lengths, q, k, v, log_decay, beta)))
    full = (cursors + lengths == size)[:, None, None, None]
    state = state.at[layer, write_slots].set(jnp.where(full, S.astype(state.dtype), checkpoint))
    ring_k, ring_u, ring_log_decay = (
        ring.at[layer, write_slots].set(old.at[rows, cursors].set(new))
        for ring, old, new in zip((ring_k, ring_u, ring_log_decay), (old_k, old_u, old_log_decay), record, strict=True)
    )
    return out[:, None], state, ring_k, ring_u, ring_log_decay
