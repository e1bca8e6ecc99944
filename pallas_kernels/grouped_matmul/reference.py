"""Mixture of experts as its definition reads, one token after the other, in float32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul.experts import Activation, ExpertBiases, of_layer


def routed_experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: Float[Array, "*R E I D"] | tuple[Float[Array, "I D"], ...] | None,
    up: Float[Array, "*R E I D"] | tuple[Float[Array, "I D"], ...],
    down: Float[Array, "*R E D I"] | tuple[Float[Array, "D I"], ...],
    valid: Bool[Array, "N"],
    *,
    activation: Activation,
    biases: ExpertBiases | None = None,
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "N D"]:
    """See `pallas_kernels.grouped_matmul.routed_experts`."""
    gate, up, down = of_layer(layer, gate, up, down)
    gates, ups, downs = (None if stack is None else jnp.asarray(stack, jnp.float32) for stack in (gate, up, down))
    gate_bias, up_bias, down_bias = biases or (None, None, None)

    def product(matrices, bias, experts, row):
        out = jnp.einsum("kba,ka->kb", matrices[experts], row)
        return out if bias is None else out + bias[experts]

    def token(inputs):
        row, experts, factors = inputs
        rows = jnp.broadcast_to(row, (experts.shape[0], row.shape[0]))
        gated = None if gates is None else product(gates, gate_bias, experts, rows)
        hidden = activation(gated, product(ups, up_bias, experts, rows))
        return factors @ product(downs, down_bias, experts, hidden)

    rows = jnp.where(valid[:, None], x.astype(jnp.float32), 0)
    here = valid[:, None] & (expert_ids >= 0) & (expert_ids < len(up))
    out = lax.map(token, (rows, jnp.where(here, expert_ids, 0), jnp.where(here, weights, 0)))
    return out.astype(x.dtype)
