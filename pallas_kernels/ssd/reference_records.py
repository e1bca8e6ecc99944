"""Mamba-2's forms on update records, one token at a time in float32: what the fast ones are tested against.

Arguments and results are those of the public functions, records taken apart into B, dt_x and log_decay.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.padding import masked
from pallas_kernels.ssd.reference import read, update


def verify(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G N"],
    C: Float[Array, "B T G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Array, Array, Array, Array]:
    """As `pallas_kernels.ssd.verify.verify`."""
    A, D = A.astype(jnp.float32), D.astype(jnp.float32)

    def step(h, token):
        x, dt, B, C = token
        record = B, dt[..., None] * x, dt * A
        h = update(h, record)
        return h, (read(h, C) + D[:, None] * x, *record)

    tokens = tuple(v.swapaxes(0, 1) for v in masked(lengths, x, dt, B, C))
    _, results = jax.lax.scan(step, state[layer, read_slots].astype(jnp.float32), tokens)
    out, B, dt_x, log_decay = (v.swapaxes(0, 1) for v in results)
    return out, B, dt_x.reshape(*dt_x.shape[:2], -1), log_decay


def apply(
    h: Float[Array, "B H P N"],
    B: Float[Array, "B T G N"],
    dt_x: Float[Array, "B T H*P"],
    log_decay: Float[Array, "B T H"],
    counts: Int[Array, " B"],
) -> Float[Array, "B H P N"]:
    """The states after the first counts[b] records of each row."""
    B, dt_x, log_decay = (
        v.swapaxes(0, 1) for v in masked(counts, B, dt_x.reshape(*dt_x.shape[:2], *h.shape[1:3]), log_decay)
    )
    return jax.lax.scan(lambda h, record: (update(h, record), None), h, (B, dt_x, log_decay))[0]


def replay(
    B: Float[Array, "B T G N"],
    dt_x: Float[Array, "B T H*P"],
    log_decay: Float[Array, "B T H"],
    accepted: Int[Array, " B"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
) -> Float[Array, "L S H P N"]:
    """As `pallas_kernels.ssd.replay.replay`."""
    h = apply(state[layer, read_slots].astype(jnp.float32), B, dt_x, log_decay, accepted)
    return state.at[layer, write_slots].set(h.astype(state.dtype))


def buffered(
    x: Float[Array, "B 1 H P"],
    dt: Float[Array, "B 1 H"],
    A: Float[Array, " H"],
    B: Float[Array, "B 1 G N"],
    C: Float[Array, "B 1 G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    ring_B: Float[Array, "L S W G N"],
    ring_dt_x: Float[Array, "L S W H*P"],
    ring_log_decay: Float[Array, "L S W H"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    cursors: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Array, Array, Array, Array, Array]:
    """As `pallas_kernels.ssd.buffered.buffered`."""
    checkpoint = state[layer, read_slots]
    old_B, old_dt_x, old_log_decay = (ring[layer, read_slots] for ring in (ring_B, ring_dt_x, ring_log_decay))
    size, rows = ring_B.shape[2], jnp.arange(len(cursors))
    h = apply(checkpoint.astype(jnp.float32), old_B, old_dt_x, old_log_decay, cursors)
    x, dt, B, C = (v[:, 0] for v in masked(lengths, x, dt, B, C))
    record = B, dt[..., None] * x, dt * A.astype(jnp.float32)
    h = update(h, record)
    full = (cursors + lengths == size)[:, None, None, None]
    state = state.at[layer, write_slots].set(jnp.where(full, h.astype(state.dtype), checkpoint))
    ring_B, ring_dt_x, ring_log_decay = (
        ring.at[layer, write_slots].set(old.at[rows, cursors].set(new.reshape(old[:, 0].shape)))
        for ring, old, new in zip(
            (ring_B, ring_dt_x, ring_log_decay), (old_B, old_dt_x, old_log_decay), record, strict=True
        )
    )
    out = read(h, C) + D.astype(jnp.float32)[:, None] * x
    return out[:, None], state, ring_B, ring_dt_x, ring_log_decay
