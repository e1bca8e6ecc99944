"""Mixture of experts for CPUs: blocks of one expert's rows, each through a branch that holds that expert's weights.

The number of blocks is data, so that time follows the valid tokens. `lax.switch` over one weight buffer per expert
reads the buffer where it lies; indexing a stacked array would copy the expert first, and a ragged dot reads them all.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul.grouping import combine, group_by_expert

# Most rows of one product.
MAX_BLOCK_ROWS = 64


def block_rows(assignments: int, num_experts: int) -> int:
    """Rows per block: an expert's mean share, rounded up to a power of two, at most MAX_BLOCK_ROWS; 1 for one token."""
    share = max(1, assignments // num_experts)
    return min(MAX_BLOCK_ROWS, 1 << (share - 1).bit_length())


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
    num_experts = len(gate)
    size = block_rows(expert_ids.size, num_experts)
    grouping = group_by_expert(expert_ids, valid, num_experts)
    # Blocks may reach past their expert's last row: the next block overwrites what they put there, and after the last
    # one come rows of invalid tokens and `size` spare ones.
    rows = jnp.pad(x[grouping.tokens], ((0, size), (0, 0)))
    first_rows = jnp.cumsum(grouping.sizes) - grouping.sizes
    blocks = (grouping.sizes + size - 1) // size
    block_ends = jnp.cumsum(blocks)
    apply_expert = _expert_function(gate, up, down)

    def body(index, products):
        expert = jnp.searchsorted(block_ends, index, side="right")
        place = first_rows[expert] + (index - (block_ends - blocks)[expert]) * size
        product = apply_expert(expert, lax.dynamic_slice_in_dim(rows, place, size))
        return lax.dynamic_update_slice_in_dim(products, product, place, axis=0)

    products = lax.fori_loop(0, block_ends[-1], body, jnp.zeros(rows.shape, jnp.float32))
    return combine(products, grouping, weights, valid).astype(x.dtype)


def _expert_function(gate, up, down) -> Callable[[Int[Array, ""], Float[Array, "M D"]], Float[Array, "M D"]]:
    """(expert, rows) -> that expert's products of the rows, float32."""
    if not isinstance(gate, tuple):
        return lambda expert, rows: _swiglu(rows, gate[expert], up[expert], down[expert])

    def branch(*matrices):
        return lambda rows: _swiglu(rows, *matrices)

    branches = [branch(*matrices) for matrices in zip(gate, up, down, strict=True)]
    return lambda expert, rows: lax.switch(expert, branches, rows)


def _swiglu(
    rows: Float[Array, "M D"], gate: Float[Array, "I D"], up: Float[Array, "I D"], down: Float[Array, "D I"]
) -> Float[Array, "M D"]:
    hidden = jax.nn.silu(_product(rows, gate)) * _product(rows, up)
    return _product(hidden.astype(rows.dtype), down)


def _product(rows: Float[Array, "M a"], matrix: Float[Array, "b a"]) -> Float[Array, "M b"]:
    return jnp.einsum("ma,ba->mb", rows, matrix, preferred_element_type=jnp.float32)
