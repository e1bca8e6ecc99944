"""Mixture of experts over stacked weights through XLA's ragged dot: for accelerators."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul.experts import Activation, ExpertBiases, of_layer
from pallas_kernels.grouped_matmul.grouping import assigned_here, combine, group_by_expert

# Rows [A, in] in groups against matrices [E, out, in].
_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def routed_experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: Float[Array, "*R E I D"] | None,
    up: Float[Array, "*R E I D"],
    down: Float[Array, "*R E D I"],
    valid: Bool[Array, "N"],
    *,
    activation: Activation,
    biases: ExpertBiases | None = None,
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "N D"]:
    """See `pallas_kernels.grouped_matmul.routed_experts`."""
    gate, up, down = of_layer(layer, gate, up, down)
    count = up.shape[0]
    here = assigned_here(expert_ids, valid, count)
    grouping = group_by_expert(expert_ids, here, count)
    rows = jnp.where(valid[:, None], x, 0)[grouping.tokens]
    gate_bias, up_bias, down_bias = biases or (None, None, None)
    ends = jnp.cumsum(grouping.sizes)
    expert_of_row = jnp.minimum(jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right"), count - 1)

    def product(rows, matrices, bias):
        out = lax.ragged_dot_general(rows, matrices, grouping.sizes, _DIMENSIONS, preferred_element_type=jnp.float32)
        return out if bias is None else out + bias[expert_of_row].astype(jnp.float32)

    hidden = activation(None if gate is None else product(rows, gate, gate_bias), product(rows, up, up_bias))
    products = product(hidden.astype(x.dtype), down, down_bias)
    return combine(products, grouping.places, here, weights).astype(x.dtype)
