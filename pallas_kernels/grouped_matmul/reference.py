"""Mixture of experts as its definition reads, one token after the other, in float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def swiglu_experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: Float[Array, "E I D"] | tuple[Float[Array, "I D"], ...],
    up: Float[Array, "E I D"] | tuple[Float[Array, "I D"], ...],
    down: Float[Array, "E D I"] | tuple[Float[Array, "D I"], ...],
    valid: Bool[Array, "N"],
) -> Float[Array, "N D"]:
    """See `pallas_kernels.grouped_matmul.swiglu_experts`."""
    gates, ups, downs = (jnp.asarray(stack, jnp.float32) for stack in (gate, up, down))

    def token(inputs):
        row, experts, factors = inputs
        hidden = jax.nn.silu(gates[experts] @ row) * (ups[experts] @ row)
        return jnp.einsum("k,kdi,ki->d", factors, downs[experts], hidden)

    rows = jnp.where(valid[:, None], x.astype(jnp.float32), 0)
    out = lax.map(token, (rows, expert_ids, jnp.where(valid[:, None], weights, 0)))
    return out.astype(x.dtype)
