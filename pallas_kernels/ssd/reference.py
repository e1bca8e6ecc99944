"""Mamba-2's recurrence, one token at a time in float32: the definition that the fast forms are tested against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
) -> tuple[Float[Array, "B T H P"], Float[Array, "L S H P N"]]:
    """Arguments and result as in `pallas_kernels.ssd.ssd`."""
    heads_per_group = x.shape[2] // B.shape[2]
    A, D = A.astype(jnp.float32), D.astype(jnp.float32)

    def step(h, token):
        x, dt, B, C, valid = token
        x, dt, B, C = (
            jnp.where(valid.reshape(-1, *(1,) * (v.ndim - 1)), v, 0).astype(jnp.float32) for v in (x, dt, B, C)
        )
        B, C = (jnp.repeat(v, heads_per_group, axis=1) for v in (B, C))
        h = jnp.exp(dt * A)[..., None, None] * h + (dt[..., None] * x)[..., None] * B[:, :, None]
        return h, jnp.einsum("bhpn,bhn->bhp", h, C, precision="highest") + D[:, None] * x

    valid = jnp.arange(x.shape[1])[:, None] < lengths
    tokens = [v.swapaxes(0, 1) for v in (x, dt, B, C)]
    h, y = jax.lax.scan(step, state[layer, read_slots].astype(jnp.float32), (*tokens, valid))
    return y.swapaxes(0, 1), state.at[layer, write_slots].set(h.astype(state.dtype))
