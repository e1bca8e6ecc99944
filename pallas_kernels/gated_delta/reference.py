"""The gated delta rule, one token at a time in float32: the definition that the fast forms are tested against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "L N Hv dk dv"]]:
    """Arguments and result as in `pallas_kernels.gated_delta.gated_delta`."""
    groups = v.shape[2] // k.shape[2]
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]

    def l2(x):
        return x / jnp.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)

    def step(S, token):
        q, k, v, g, beta, valid = token
        q, k, v, g, beta = (
            jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), x, 0).astype(jnp.float32) for x in (q, k, v, g, beta)
        )
        q = jnp.repeat(l2(q) * q.shape[-1] ** -0.5, groups, axis=1)
        k = jnp.repeat(l2(k), groups, axis=1)
        S = jnp.exp(g)[..., None] * S
        u = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", S, k, precision="highest"))
        S = S + k[..., None] * u[..., None, :]
        return S, jnp.einsum("bhkv,bhk->bhv", S, q, precision="highest")

    valid = jnp.arange(q.shape[1])[:, None] < lengths
    tokens = [x.swapaxes(0, 1) for x in (q, k, v, log_decay, beta)]
    S, out = jax.lax.scan(step, state[layer, read_slots].astype(jnp.float32), (*tokens, valid))
    return out.swapaxes(0, 1), state.at[layer, write_slots].set(S.astype(state.dtype))
