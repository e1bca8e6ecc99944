"""Mixture of experts over stacked weights through XLA's ragged dot: for accelerators, and differentiable."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul.grouping import combine, group_by_expert

# Rows [A, in] in groups against matrices [E, out, in].
_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def swiglu_experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: Float[Array, "E I D"],
    up: Float[Array, "E I D"],
    down: Float[Array, "E D I"],
    valid: Bool[Array, "N"],
) -> Float[Array, "N D"]:
    """See `pallas_kernels.grouped_matmul.swiglu_experts`."""
    grouping = group_by_expert(expert_ids, valid, gate.shape[0])
    rows = jnp.where(valid[:, None], x, 0)[grouping.tokens]

    def product(rows, matrices):
        return lax.ragged_dot_general(rows, matrices, grouping.sizes, _DIMENSIONS, preferred_element_type=jnp.float32)

    hidden = jax.nn.silu(product(rows, gate)) * product(rows, up)
    return combine(product(hidden.astype(x.dtype), down), grouping, weights, valid).astype(x.dtype)
