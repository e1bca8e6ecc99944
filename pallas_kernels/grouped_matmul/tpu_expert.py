"""An expert's three products in a grid step on TPU: one tile of rows, and all of the inner width or a part of it.

What is between the products never leaves VMEM. Matrices are read in any layer of a stack where they lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.experts import Activation, ExpertBiases

# Rows of a tile: the least that fill a packed register, and the most.
MIN_ROWS, MAX_ROWS = 16, 256
# Of a row, in VMEM: itself and its output, twice each, its sum and what is added to that.
_BYTES_A_WIDTH = 16
# Weights of a grid step; there are two such blocks, one computed on and one on its way.
BLOCK_BYTES = 16 << 20
VMEM_BYTES = 56 << 20
_SPARE_BYTES = 4 << 20


def tiling(assignments: int, num_experts: int, inner: int, width: int, inner_bytes: int) -> tuple[int, int]:
    """Rows and inner channels of a grid step. `inner_bytes`: of an expert's weights, for each inner channel.

    A tile has an expert's mean share of rows, up to a power of two; twice that where its weights come in several parts.
    For a second tile of the same expert costs nothing if its weights are still there, else all of them once more.
    """
    rows = block = 0
    for shares in (1, 2):
        rows = min(MAX_ROWS, max(MIN_ROWS, 1 << (-(-shares * assignments // num_experts) - 1).bit_length()))
        rows_bytes = _BYTES_A_WIDTH * rows * width
        block = inner_block(inner, inner_bytes, min(BLOCK_BYTES, (VMEM_BYTES - _SPARE_BYTES - rows_bytes) // 2))
        if block == inner:
            break
    return rows, block


def inner_block(inner: int, inner_bytes: int, most_bytes: int) -> int:
    """Inner channels of a grid step: all of them, or about equal multiples of 128."""
    if inner * inner_bytes <= most_bytes:
        return inner
    most = max(128, most_bytes // inner_bytes // 128 * 128)
    return 128 * pl.cdiv(pl.cdiv(inner, pl.cdiv(inner, most)), 128)


@dataclass(frozen=True)
class Experts:
    """Stacks [R, E, I, D] and [R, E, D, I] of a call, and the biases of its layer."""

    gate: Float[Array, "R E I D"] | None
    up: Float[Array, "R E I D"]
    down: Float[Array, "R E D I"]
    biases: ExpertBiases | None
    activation: Activation

    def tiling(self, assignments: int) -> tuple[int, int]:
        """Rows of a tile, and inner channels of a part."""
        count, inner, width = self.up.shape[1:]
        matrices = 2 if self.gate is None else 3
        return tiling(assignments, count, inner, width, matrices * width * self.up.dtype.itemsize)

    def operands(self, block: int) -> list[tuple[Array, pl.BlockSpec]]:
        """Matrices and biases with a step's blocks of them, on a grid of (tiles, parts) that knows the layer and each
        tile's expert."""
        width = self.up.shape[3]
        into = pl.BlockSpec((None, None, block, width), lambda t, i, layer, expert, *_: (layer[0], expert[t], i, 0))
        out_of = pl.BlockSpec((None, None, width, block), lambda t, i, layer, expert, *_: (layer[0], expert[t], 0, i))
        operands = [*([(self.gate, into)] if self.gate is not None else []), (self.up, into), (self.down, out_of)]
        if self.biases is not None:
            inner_bias = pl.BlockSpec((None, 1, block), lambda t, i, layer, expert, *_: (expert[t], 0, i))
            width_bias = pl.BlockSpec((None, 1, width), lambda t, i, layer, expert, *_: (expert[t], 0, 0))
            *before, last = [bias.astype(jnp.float32)[:, None] for bias in self.biases if bias is not None]
            operands += [*((bias, inner_bias) for bias in before), (last, width_bias)]
        return operands

    def accumulate(self, x: Float[Array, "M D"], blocks: Sequence[Any], total: Any) -> None:
        """In a grid step: to `total` [M, D] what x becomes by this part of the inner width; `blocks` of `operands`."""
        number = 2 + (self.gate is not None)
        (*into, down), biases = blocks[:number], blocks[number:]
        part, block, inner = pl.program_id(1), down.shape[1], self.up.shape[2]
        products = [_product(x, matrix[...]) for matrix in into]
        if biases:
            products = [product + bias[...] for product, bias in zip(products, biases, strict=False)]
        hidden, last = self.activation(products[0] if number == 3 else None, products[-1]), down[...]
        if inner % block:  # the last part reaches beyond the matrices
            inside = jax.lax.broadcasted_iota(jnp.int32, (1, block), 1) < inner - part * block
            hidden, last = jnp.where(inside, hidden, 0), jnp.where(inside, last, 0)
        added = _product(hidden.astype(x.dtype), last)

        @pl.when(part == 0)
        def _():
            total[...] = added + biases[-1][...] if biases else added

        @pl.when(part > 0)
        def _():
            total[...] += added

    def cost(self, tiles: int, rows: int, moved: int) -> pl.CostEstimate:
        """Of so many tiles and rows, and of so many bytes besides the matrices."""
        count, inner, width = self.up.shape[1:]
        matrix, matrices = inner * width, 2 if self.gate is None else 3
        weights = min(tiles, count) * matrices * matrix * self.up.dtype.itemsize
        return pl.CostEstimate(
            flops=2 * matrices * rows * matrix, transcendentals=rows * inner, bytes_accessed=weights + moved
        )


def _product(a: Float[Array, "m k"], b: Float[Array, "n k"]) -> Float[Array, "m n"]:
    """a b^T, of factors as they are, summed in float32."""
    precision = "highest" if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b.astype(a.dtype), (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
