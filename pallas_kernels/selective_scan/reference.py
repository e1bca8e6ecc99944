"""Mamba-1's recurrence, one token at a time in float32: the definition that the fast forms are tested against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def selective_scan(
    x: Float[Array, "B T E"],
    dt: Float[Array, "B T E"],
    A: Float[Array, "N E"],
    B: Float[Array, "B T N"],
    C: Float[Array, "B T N"],
    D: Float[Array, " E"],
    state: Float[Array, "L S N E"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T E"], Float[Array, "L S N E"]]:
    """Arguments and result as in `pallas_kernels.selective_scan.selective_scan`."""
    A, D = A.astype(jnp.float32), D.astype(jnp.float32)

    def step(h, token):
        x, dt, B, C, valid = token
        x, dt, B, C = (jnp.where(valid[:, None], v, 0).astype(jnp.float32) for v in (x, dt, B, C))
        h = jnp.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B[..., None]
        return h, jnp.einsum("bne,bn->be", h, C, precision="highest") + D * x

    valid = jnp.arange(x.shape[1])[:, None] < lengths
    tokens = [v.swapaxes(0, 1) for v in (x, dt, B, C)]
    h, y = jax.lax.scan(step, state[layer, read_slots].astype(jnp.float32), (*tokens, valid))
    return y.swapaxes(0, 1), state.at[layer, write_slots].set(h.astype(state.dtype))
