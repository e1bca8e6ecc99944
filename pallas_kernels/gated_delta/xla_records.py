"""The gated delta rule's forms on update records for any XLA backend: see `xla.py` for the maths of a chunk."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import slots
from pallas_kernels.gated_delta import xla
from pallas_kernels.gated_delta.xla_fold import fold
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

    def step(S, inputs):
        S, out, u = xla.chunk(S, inputs)
        return S, (out, u)

    valid = jnp.arange(q.shape[1]) < lengths[:, None]
    S = state[layer, read_slots].astype(jnp.float32)
    _, (out, u) = xla.over_chunks(step, S, q, k, v, log_decay, beta, valid)
    k, log_decay = masked(lengths, k, log_decay)
    return out, xla.normalised(k), u, log_decay


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
    S = fold(slots.read(state, layer, read_slots).astype(jnp.float32), k, u, log_decay, accepted)
    return slots.write(state, layer, write_slots, lambda row: S[row])


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
    """As `pallas_kernels.gated_delta.buffered.buffered`. Unlike the kernels it writes the state at every step."""
    checkpoint = slots.read(state, layer, read_slots)
    old_k, old_u, old_log_decay = (slots.read(ring, layer, read_slots) for ring in (ring_k, ring_u, ring_log_decay))
    S = fold(checkpoint.astype(jnp.float32), old_k, old_u, old_log_decay, cursors)
    S, out, u = xla.chunk(S, (q, k, v, log_decay, beta, lengths[:, None] > 0))
    k, log_decay = masked(lengths, k, log_decay)
    position = jnp.arange(ring_k.shape[2]) == cursors[:, None]

    def append(ring, old, record):
        new = jnp.where(jnp.expand_dims(position, range(2, old.ndim)), record, old)
        return slots.write(ring, layer, write_slots, lambda row: new[row])

    full = (cursors + lengths == ring_k.shape[2])[:, None, None, None]
    S = jnp.where(full, S.astype(state.dtype), checkpoint)
    return (
        out, slots.write(state, layer, write_slots, lambda row: S[row]), append(ring_k, old_k, xla.normalised(k)),
        append(ring_u, old_u, u), append(ring_log_decay, old_log_decay, log_decay),
    )  # fmt: skip
