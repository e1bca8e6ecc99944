"""The gated delta rule's forms on update records for any XLA backend: see `xla.py` for the maths of a chunk.

n records at once are d(n) S + sum_i (d(i, n) k_i) u_i^T: a decay between tokens is the exponential of a sum over just
the tokens between, so nothing overflows or cancels.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import slots
from pallas_kernels.gated_delta import xla

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


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
    k, log_decay = _masked(lengths, k, log_decay)
    return out, xla.normalised(k), u, log_decay


def fold(
    S: Float[Array, "B Hv dk dv"],
    k: Float[Array, "B T Hk dk"],
    u: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    counts: Int[Array, " B"],
) -> Float[Array, "B Hv dk dv"]:
    """The states after the first counts[b] records of each row."""
    k, u, log_decay = _masked(counts, k, u, log_decay)
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    later = jax.lax.cumsum(jnp.pad(log_decay[:, 1:], [(0, 0), (0, 1), (0, 0), (0, 0)]), axis=1, reverse=True)
    k = jnp.repeat(k, u.shape[2] // k.shape[2], axis=2) * jnp.exp(later)
    return jnp.exp(later[:, 0] + log_decay[:, 0])[..., None] * S + _einsum("bthk,bthv->bhkv", k, u)


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
    k, log_decay = _masked(lengths, k, log_decay)
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


def _masked(counts: Int[Array, " B"], *arrays: Float[Array, "B T ..."]) -> list[Float[Array, "B T ..."]]:
    """In float32, with 0 in place of all but the first counts[b] tokens."""
    valid = jnp.arange(arrays[0].shape[1]) < counts[:, None]
    return [jnp.where(jnp.expand_dims(valid, range(2, x.ndim)), x, 0).astype(jnp.float32) for x in arrays]
