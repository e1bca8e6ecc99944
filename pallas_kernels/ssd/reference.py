"""Mamba-2's recurrence, one token at a time in float32: the definition that the fast forms are tested against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.padding import masked


def ssd(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G N"],
    C: Float[Array, "B T G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
) -> tuple[Float[Array, "B T H P"], Float[Array, "L S H P N"]]:
    """Arguments and result as in `pallas_kernels.ssd.ssd`."""
    A, D = A.astype(jnp.float32), D.astype(jnp.float32)

    def step(carry, token):
        number, h, kept = carry
        x, dt, B, C = token
        h = update(h, (B, dt[..., None] * x, dt * A))
        if checkpoint_lengths is not None:
            kept = jnp.where((checkpoint_lengths == number + 1)[..., None, None, None], h[:, None], kept)
        return (number + 1, h, kept), read(h, C) + D[:, None] * x

    tokens = [v.swapaxes(0, 1) for v in masked(lengths, x, dt, B, C)]
    h = state[layer, read_slots].astype(jnp.float32)
    kept = None if checkpoint_slots is None else state[layer, checkpoint_slots].astype(jnp.float32)
    (_, h, kept), y = jax.lax.scan(step, (0, h, kept), tuple(tokens))
    state = state.at[layer, write_slots].set(h.astype(state.dtype))
    if kept is not None:
        state = state.at[layer, checkpoint_slots].set(kept.astype(state.dtype))
    return y.swapaxes(0, 1), state


def update(h: Float[Array, "B H P N"], record: tuple[Array, Array, Array]) -> Float[Array, "B H P N"]:
    """exp(dt A) h + (dt x) B^T, from B [B, G, N], dt x [B, H, P] and dt A [B, H]."""
    B, dt_x, log_decay = record
    B = jnp.repeat(B, h.shape[1] // B.shape[1], axis=1)
    return jnp.exp(log_decay)[..., None, None] * h + dt_x[..., None] * B[:, :, None]


def read(h: Float[Array, "B H P N"], C: Float[Array, "B G N"]) -> Float[Array, "B H P"]:
    """h C"""
    C = jnp.repeat(C, h.shape[1] // C.shape[1], axis=1)
    return jnp.einsum("bhpn,bhn->bhp", h, C, precision="highest")
