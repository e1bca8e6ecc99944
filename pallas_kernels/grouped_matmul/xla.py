"""Mixture of experts for CPUs: blocks of one expert's rows, each through a branch that holds that expert's weights.

The number of blocks is data, so that time follows the valid tokens. `lax.switch` over one weight buffer per expert
reads the buffer where it lies; indexing a stacked array would copy the expert first, and a ragged dot reads them all.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul.experts import Activation, ExpertBiases, of_layer
from pallas_kernels.grouped_matmul.grouping import assigned_here, combine, group_by_expert

# Most rows of one product: where a CPU core reaches its peak.
MAX_BLOCK_ROWS = 64
# Up to this mean share, matrix-vector products one after the other are no slower than products of several rows, which
# repack the weights first.
MAX_SHARE_OF_SINGLE_ROWS = 2


def block_rows(assignments: int, num_experts: int) -> int:
    """Rows per block: 1 for few, else 1.5 times an expert's mean share, up to a power of two and MAX_BLOCK_ROWS."""
    if assignments <= MAX_SHARE_OF_SINGLE_ROWS * num_experts:
        return 1
    share = 3 * assignments // (2 * num_experts)
    return min(MAX_BLOCK_ROWS, 1 << (share - 1).bit_length())


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
    num_experts = len(up)
    size = block_rows(expert_ids.size, num_experts)
    here = assigned_here(expert_ids, valid, num_experts)
    grouping = group_by_expert(expert_ids, here, num_experts)
    # Blocks may reach past their expert's last row: the next block overwrites what they put there, and after the last
    # one come rows of invalid tokens and `size` spare ones.
    rows = jnp.pad(x[grouping.tokens], ((0, size), (0, 0)))
    first_rows = jnp.cumsum(grouping.sizes) - grouping.sizes
    blocks = (grouping.sizes + size - 1) // size
    block_ends = jnp.cumsum(blocks)
    apply_expert = _expert_function(gate, up, down, biases, activation)

    def body(index, products):
        expert = jnp.searchsorted(block_ends, index, side="right")
        place = first_rows[expert] + (index - (block_ends - blocks)[expert]) * size
        product = apply_expert(expert, lax.dynamic_slice_in_dim(rows, place, size))
        return lax.dynamic_update_slice_in_dim(products, product, place, axis=0)

    products = lax.fori_loop(0, block_ends[-1], body, jnp.zeros(rows.shape, jnp.float32))
    return combine(products, grouping.places, here, weights).astype(x.dtype)


def _expert_function(
    gate, up, down, biases: ExpertBiases | None, activation: Activation
) -> Callable[[Int[Array, ""], Float[Array, "M D"]], Float[Array, "M D"]]:
    """(expert, rows) -> that expert's products of the rows, float32."""
    if not isinstance(up, tuple):
        return lambda expert, rows: _feed_forward(
            rows, None if gate is None else gate[expert], up[expert], down[expert], _row(biases, expert), activation
        )

    def branch(gate, up, down):
        return lambda rows, bias: _feed_forward(rows, gate, up, down, bias, activation)

    branches = [branch(*matrices) for matrices in zip(gate or (None,) * len(up), up, down, strict=True)]
    return lambda expert, rows: lax.switch(expert, branches, rows, _row(biases, expert))


def _row(biases: ExpertBiases | None, expert: Int[Array, ""]) -> tuple[Float[Array, " _"] | None, ...]:
    if biases is None:
        return (None, None, None)
    return tuple(None if bias is None else bias[expert].astype(jnp.float32) for bias in biases)


def _feed_forward(
    rows: Float[Array, "M D"],
    gate: Float[Array, "I D"] | None,
    up: Float[Array, "I D"],
    down: Float[Array, "D I"],
    biases: tuple[Float[Array, " _"] | None, ...],
    activation: Activation,
) -> Float[Array, "M D"]:
    gate_bias, up_bias, down_bias = biases
    if rows.shape[0] == 1:
        gated = None if gate is None else _plus(_times_rows(rows, gate), gate_bias)
        hidden = activation(gated, _plus(_times_rows(rows, up), up_bias))
        return _plus(_times_rows(hidden.astype(rows.dtype), down), down_bias)
    # Several rows as columns: XLA:CPU then repacks the weights at less cost. The barrier keeps it from turning the last
    # product around again.
    columns = rows.T
    gated = None if gate is None else _plus(_times_columns(gate, columns), gate_bias, columns=True)
    hidden = activation(gated, _plus(_times_columns(up, columns), up_bias, columns=True))
    products = lax.optimization_barrier(_times_columns(down, hidden.astype(rows.dtype)))
    return _plus(products.T, down_bias)


def _plus(products: Float[Array, "M b"], bias: Float[Array, " b"] | None, columns: bool = False) -> Float[Array, "M b"]:
    if bias is None:
        return products
    return products + (bias[:, None] if columns else bias)


def _times_rows(rows: Float[Array, "1 a"], matrix: Float[Array, "b a"]) -> Float[Array, "1 b"]:
    return jnp.einsum("ma,ba->mb", rows, matrix, preferred_element_type=jnp.float32)


def _times_columns(matrix: Float[Array, "b a"], columns: Float[Array, "a M"]) -> Float[Array, "b M"]:
    return jnp.einsum("ba,am->bm", matrix, columns, preferred_element_type=jnp.float32)
