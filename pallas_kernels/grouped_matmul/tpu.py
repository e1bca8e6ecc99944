"""Mixture of experts on TPU: one kernel for an expert's three products, which reads every chosen expert's weights once.

Rows are sorted by expert, and each expert's padded to whole tiles, so that a grid step has one tile of rows and one
expert, or part of its inner width; consecutive tiles of one expert find its weights in VMEM. What is between the
products never leaves VMEM. XLA's ragged dot wants matrices stored [in, out] and, in a scan over layers, a copy of every
layer's experts; this one reads any layer of a stack where it lies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul.experts import Activation, ExpertBiases, untileable
from pallas_kernels.grouped_matmul.grouping import assigned_here, combine, group_by_expert, most_tiles

# Rows of a tile: the least that fill a packed register, and the most.
MIN_ROWS, MAX_ROWS = 16, 256
# Of a row, in VMEM: itself and its output, twice each, its sum and what is added to that.
_BYTES_A_WIDTH = 16
# Weights of a grid step; there are two such blocks, one computed on and one on its way.
BLOCK_BYTES = 16 << 20
VMEM_BYTES = 56 << 20
_SPARE_BYTES = 4 << 20


def accepts(
    x: Array, expert_ids: Array, weights: Array, gate: Any, up: Any, down: Any, *_: Any, **options: Any
) -> str | None:
    """Why the kernel cannot run these arguments of `routed_experts`, or None."""
    return untileable(up)


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
    interpret: Any = False,
) -> Float[Array, "N D"]:
    """See `pallas_kernels.grouped_matmul.routed_experts`; `interpret` as of `pallas_call`."""
    matrices = [None if each is None else each if layer is not None else each[None] for each in (gate, up, down)]
    count, inner, width = up.shape[-3:]
    inner_bytes = (2 if gate is None else 3) * width * up.dtype.itemsize
    rows, block = tiling(expert_ids.size, count, inner, width, inner_bytes)
    tiles = most_tiles(expert_ids.size, count, rows)
    here = assigned_here(expert_ids, valid, count)
    grouping = group_by_expert(expert_ids, here, count)
    expert_tiles = -(-grouping.sizes // rows)
    tile_ends = jnp.cumsum(expert_tiles)
    starts = jnp.cumsum(grouping.sizes) - grouping.sizes
    # How far an expert's rows move, from the sorted ones to the padded.
    shift = (tile_ends - expert_tiles) * rows - starts
    expert_of_tile = jnp.minimum(jnp.searchsorted(tile_ends, jnp.arange(tiles), side="right"), count - 1)
    source = jnp.arange(tiles * rows) - jnp.repeat(shift[expert_of_tile], rows)
    # Rows that fill up a tile hold any token; nothing reads what becomes of them.
    tokens = grouping.tokens[jnp.clip(source, 0, expert_ids.size - 1)]
    products = _products(
        x[tokens], matrices, biases, expert_of_tile, tile_ends[-1],
        jnp.asarray(0 if layer is None else layer, jnp.int32), (rows, block), activation, interpret,
    )  # fmt: skip
    places = grouping.places + shift[jnp.clip(expert_ids, 0, count - 1)]
    return combine(products, places, here, weights).astype(x.dtype)


def _products(
    rows: Float[Array, "M D"],
    matrices: list[Array | None],
    biases: ExpertBiases | None,
    expert_of_tile: Int[Array, " tiles"],
    used_tiles: Int[Array, ""],
    layer: Int[Array, ""],
    blocks: tuple[int, int],
    activation: Activation,
    interpret: Any,
) -> Float[Array, "M D"]:
    """Every padded row through its tile's expert, in blocks of rows and inner channels; unused tiles hold anything."""
    gate, up, _ = matrices
    assert up is not None
    inner, width = up.shape[-2:]
    present = [each for each in matrices if each is not None]
    tile, block = blocks
    into = pl.BlockSpec((None, None, block, width), lambda t, i, layer, expert: (layer[0], expert[t], i, 0))
    out_of = pl.BlockSpec((None, None, width, block), lambda t, i, layer, expert: (layer[0], expert[t], 0, i))
    row_block = pl.BlockSpec((tile, width), lambda t, *_: (t, 0))
    inner_bias = pl.BlockSpec((None, 1, block), lambda t, i, layer, expert: (expert[t], 0, i))
    width_bias = pl.BlockSpec((None, 1, width), lambda t, i, layer, expert: (expert[t], 0, 0))
    specs = [row_block, *([into] if gate is not None else []), into, out_of]
    arguments = [rows, *present]
    if biases is not None:
        given = [bias for bias in biases if bias is not None]
        specs += [inner_bias] * (len(given) - 1) + [width_bias]
        arguments += [bias.astype(jnp.float32)[:, None] for bias in given]
    return pl.pallas_call(
        functools.partial(_kernel, inner, gate is not None, activation),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(used_tiles, pl.cdiv(inner, block)),
            in_specs=specs,
            out_specs=row_block,
            scratch_shapes=[pltpu.VMEM((tile, width), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(present) * rows.shape[0] * inner * width,
            transcendentals=rows.shape[0] * inner,
            bytes_accessed=min(len(expert_of_tile), up.shape[-3]) * len(present) * inner * width * up.dtype.itemsize
            + 2 * rows.size * rows.dtype.itemsize,
        ),
        interpret=interpret,
        name="routed_experts",
    )(layer.reshape(1), expert_of_tile, *arguments)


def _kernel(inner, gated, activation, layer, expert_of_tile, rows, *refs):
    """Blocks: rows, out, total [M, D]; gate, up [I', D]; down [D, I']; biases [1, I'] and [1, D]."""
    number = 2 + gated
    (*into, down), biases, (out, total) = refs[:number], refs[number:-2], refs[-2:]
    part, block = pl.program_id(1), down.shape[1]
    x = rows[...]
    products = [_product(x, matrix[...]) for matrix in into]
    if biases:
        products = [product + bias[...] for product, bias in zip(products, biases, strict=False)]
    hidden, last = activation(products[0] if gated else None, products[-1]), down[...]
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

    @pl.when(part == pl.num_programs(1) - 1)
    def _():
        out[...] = total[...].astype(out.dtype)


def _product(a: Float[Array, "m k"], b: Float[Array, "n k"]) -> Float[Array, "m n"]:
    """a b^T, of factors as they are, summed in float32."""
    precision = "highest" if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b.astype(a.dtype), (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
