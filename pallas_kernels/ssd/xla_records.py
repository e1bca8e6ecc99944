"""Mamba-2's forms on update records for any XLA backend: see `xla.py` for the maths of a chunk."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import slots
from pallas_kernels.ssd import xla
from pallas_kernels.ssd.records import records_of
from pallas_kernels.ssd.xla_fold import fold


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
    valid = jnp.arange(x.shape[1]) < lengths[:, None]
    h = slots.read(state, layer, read_slots).astype(jnp.float32)
    y, _, _ = xla.chunks(h, A.astype(jnp.float32), D.astype(jnp.float32), x, dt, B, C, valid)
    return y, *records_of(x, dt, A, B, lengths)


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
    h = slots.read(state, layer, read_slots).astype(jnp.float32)
    h = fold(h, B, dt_x.reshape(*dt_x.shape[:2], *h.shape[1:3]), log_decay, accepted)
    return slots.write(state, layer, write_slots, lambda row: h[row])


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
    """As `pallas_kernels.ssd.buffered.buffered`. Unlike the kernel it writes the state at every step."""
    checkpoint = slots.read(state, layer, read_slots)
    h, position = checkpoint.astype(jnp.float32), jnp.arange(ring_B.shape[2]) == cursors[:, None]
    rings = ring_B, ring_dt_x, ring_log_decay
    new = [
        jnp.where(jnp.expand_dims(position, range(2, ring.ndim - 1)), record, slots.read(ring, layer, read_slots))
        for ring, record in zip(rings, records_of(x, dt, A, B, lengths), strict=True)
    ]
    by_head = new[1].reshape(*new[1].shape[:2], *h.shape[1:3])
    h = fold(h, new[0], by_head, new[2], cursors + 1)
    valid = lengths[:, None] > 0
    x, C = (jnp.where(jnp.expand_dims(valid, range(2, v.ndim)), v, 0).astype(jnp.float32)[:, 0] for v in (x, C))
    C = jnp.repeat(C, h.shape[1] // C.shape[1], axis=1)
    out = jnp.einsum("bhpn,bhn->bhp", h, C, precision="highest") + D.astype(jnp.float32)[:, None] * x
    full = (cursors + lengths == ring_B.shape[2])[:, None, None, None]
    h = jnp.where(full, h.astype(state.dtype), checkpoint)
    state, ring_B, ring_dt_x, ring_log_decay = (
        slots.write(array, layer, write_slots, lambda row, rows=rows: rows[row])  # type: ignore[misc]
        for array, rows in zip((state, *rings), (h, *new), strict=True)
    )
    return out[:, None], state, ring_B, ring_dt_x, ring_log_decay
