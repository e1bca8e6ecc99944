"""Mixture of experts on CUDA GPUs, in Pallas' Triton dialect: two kernels, one up to what is between an expert's
products, and one for the last product.

Rows are sorted by expert. A program has a tile of one expert's rows and some of the product's columns, and takes what
it multiplies some channels at a time: rows of tokens from where they are, matrices, stored [out, in], from their place
in the whole stack. So a scan over layers copies none, and experts that no token chose are not read. Tiles of an expert
follow one another, and find its matrices in the second-level cache.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul.experts import Activation, ExpertBiases, untileable
from pallas_kernels.grouped_matmul.grouping import (
    assigned_here,
    combine,
    group_by_expert,
    tiles_by_expert,
    tiles_of_one_token,
)
from pallas_kernels.triton_maths import dot

# Rows of a tile: the least that matrix units take, and the most.
MIN_ROWS, MAX_ROWS = 16, 128
# Of a program's sums, in the registers of 8 warps; with twice as many the compiler spills.
_MAX_SUMS = 16384


@dataclass(frozen=True)
class Tiling:
    """Rows and columns of a program's product, and how many channels it takes at a time."""

    rows: int
    columns: int
    channels: int

    @property
    def params(self) -> triton.CompilerParams:
        """Warps that hold the sums in registers, and loads of further channels in flight."""
        return triton.CompilerParams(num_warps=8 if self.rows * self.columns > 4096 else 4, num_stages=3)


def tile_rows(assignments: int, num_experts: int, dtype: Any) -> int:
    """An expert's mean share of them, up to a power of two; of float32, which matrix units do not take, the least."""
    if dtype == jnp.float32:
        return MIN_ROWS
    return min(MAX_ROWS, max(MIN_ROWS, pl.next_power_of_2(pl.cdiv(assignments, num_experts))))


def tiling(rows: int, matrices: int, width: int, depth: int) -> Tiling:
    """Of as many products, of `width` columns over `depth` channels.

    Few rows make small products, of which many programs wait for memory together; they take wider pieces of matrices.
    """
    few = rows <= 32
    wide = width % 128 == 0 and not few and rows * 128 * matrices <= _MAX_SUMS
    return Tiling(rows, 128 if wide else 64, 128 if depth % 128 == 0 and few else 64)


def accepts(
    x: Array, expert_ids: Array, weights: Array, gate: Any, up: Any, down: Any, *_: Any, **__: Any
) -> str | None:
    """Why the kernels cannot run these arguments of `routed_experts`, or None."""
    return untileable(up)


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
    *into, out_of = (each if each is None or layer is not None else each[None] for each in (gate, up, down))
    added: list[Array | None] = list(biases or (None, None, None))
    count, inner, width = up.shape[-3:]
    rows = tile_rows(expert_ids.size, count, x.dtype)
    first, last = tiling(rows, 1 if gate is None else 2, inner, width), tiling(rows, 1, width, inner)
    here = assigned_here(expert_ids, valid, count)
    if x.shape[0] == 1:
        tokens, places = jnp.zeros(expert_ids.size, jnp.int32), jnp.arange(expert_ids.size).reshape(expert_ids.shape)
        tiles = tiles_of_one_token(expert_ids, here)
    else:
        tokens, places, _ = grouping = group_by_expert(expert_ids, here, count)
        tiles = tiles_by_expert(grouping, rows)
    number = jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)
    product = functools.partial(_product, numbers=(number, *tiles), interpret=interpret)
    between = activation if gate is not None else functools.partial(activation, None)
    hidden = product("routed_experts_in", first, between, x, tokens, into, added[:2])
    products = product("routed_experts_out", last, lambda y: y, hidden, None, [out_of], added[2:])
    return combine(products, places, here, weights).astype(x.dtype)


def _product(
    name: str,
    tiling: Tiling,
    finish: Callable[..., Array],
    rows: Float[Array, "M in"],
    sources: Int[Array, " A"] | None,
    matrices: list[Float[Array, "R E out in"] | None],
    biases: list[Float[Array, "E out"] | None],
    *,
    numbers: tuple[Int[Array, " _"], ...],
    interpret: Any,
) -> Float[Array, "A out"]:
    """`finish` of rows[sources] times each of the matrices of their experts, plus biases, for sorted assignments.

    `sources` None: the rows are sorted. `numbers`: the layer, and tiles. Assignments in no tile come out as anything.
    """
    stacks, added = ([each for each in group if each is not None] for group in (matrices, biases))
    _, count, width, depth = stacks[0].shape
    given = [] if sources is None else [sources]
    assignments = (given or [rows])[0].shape[0]
    used = min(count, assignments) * len(stacks) * width * depth
    return pl.pallas_call(
        functools.partial(_kernel, tiling, finish, len(given), len(stacks)),
        grid=(pl.cdiv(width, tiling.columns), numbers[1].shape[0]),
        out_shape=jax.ShapeDtypeStruct((assignments, width), rows.dtype),
        compiler_params=tiling.params,
        cost_estimate=pl.CostEstimate(
            flops=2 * assignments * len(stacks) * width * depth,
            transcendentals=assignments * width if len(stacks) > 1 else 0,
            bytes_accessed=used * stacks[0].dtype.itemsize + assignments * (width + depth) * rows.dtype.itemsize,
        ),
        interpret=interpret,
        name=name,
    )(*(x.astype(jnp.int32) for x in (*numbers, *given)), rows, *stacks, *added)


def _kernel(tiling, finish, sources_given, number_of_matrices, layer, experts, firsts, ends, *refs):
    """The arrays are whole, as `_product` takes them."""
    sources, (rows, *rest, out) = refs[:sources_given], refs[sources_given:]
    matrices, biases = rest[:number_of_matrices], rest[number_of_matrices:]
    tile, start = pl.program_id(1), pl.program_id(0) * tiling.columns
    expert, first, end = experts[tile], firsts[tile], ends[tile]
    width, depth = matrices[0].shape[2:]
    columns, is_column = pl.ds(start, tiling.columns), _inside(start, tiling.columns, width)
    assignment = first + jnp.arange(tiling.rows)
    there = assignment < end
    row = triton.load(sources[0].at[assignment], mask=there, other=0) if sources else assignment

    def add_channels(block, sums):
        start = block * tiling.channels
        channels, is_channel = pl.ds(start, tiling.channels), _inside(start, tiling.channels, depth)
        place = jnp.broadcast_arrays(row[:, None], start + jnp.arange(tiling.channels))
        values = triton.load(rows.at[*place], mask=there[:, None] & is_channel, other=0)
        mask = is_column[:, None] & is_channel
        parts = [triton.load(each.at[layer[0], expert, columns, channels], mask=mask, other=0) for each in matrices]
        return [total + dot(part, values.T, rows.dtype == jnp.float32) for total, part in zip(sums, parts, strict=True)]

    @pl.when(first < end)
    def _():
        nothing = jnp.zeros((tiling.columns, tiling.rows), jnp.float32)
        sums = jax.lax.fori_loop(0, pl.cdiv(depth, tiling.channels), add_channels, [nothing] * len(matrices))
        if biases:
            added = [triton.load(bias.at[expert, columns], mask=is_column, other=0) for bias in biases]
            sums = [total + bias.astype(jnp.float32)[:, None] for total, bias in zip(sums, added, strict=True)]
        result = finish(*sums).T
        place = jnp.broadcast_arrays(assignment[:, None], start + jnp.arange(tiling.columns))
        triton.store(out.at[*place], result.astype(out.dtype), mask=there[:, None] & is_column)


def _inside(start, size, limit):
    """Which of so many places are below the limit; the compiler need not ask where all blocks are."""
    return jnp.ones(size, bool) if limit % size == 0 else start + jnp.arange(size) < limit
