"""Softmax attention of a block of query rows over blocks of keys, for kernels in Pallas' Triton dialect.

A running maximum and sum (Milakov and Gimelshein 2018, as in FlashAttention), with scores in units of log 2. Where
there are too few rows to occupy the part, the keys of a row are shared out between programs ("splits", as in
Flash-Decoding), each of which leaves its sums for `combined` to bring together.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.triton_maths import dot

LOG2_E = 1.4426950408889634
# Stands for minus infinity in a running maximum, where a difference of two infinities would be NaN.
_LOWEST = -1e30
# Two programs for each multiprocessor of a Hopper part.
_PROGRAMS = 264
_MAX_SPLITS = 64
# Blocks of keys that are worth a program.
_LEAST_BLOCKS = 4
_COMBINED_COLUMNS = 128

# Of query rows: the highest score, the sum of 2^(score - highest), and that of the values, so weighted.
Sums = tuple[Float[Array, " R"], Float[Array, " R"], Float[Array, "R dv"]]


def splits(programs: int, blocks: int) -> int:
    """Between how many programs the keys of a block of rows are shared out.

    `programs` there would be without, and `blocks` of keys there can be at most.
    """
    return max(1, min(_PROGRAMS // programs, _MAX_SPLITS, blocks // _LEAST_BLOCKS))


def share(split: Int[Array, ""], splits: int, blocks: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """First block of a split, and the one after its last."""
    each = pl.cdiv(blocks, splits)
    return jnp.minimum(split * each, blocks), jnp.minimum((split + 1) * each, blocks)


def gather(ref: Any, index: tuple[Any, ...], columns: Int[Array, " w"], mask: Bool[Array, " R"]) -> Float[Array, "R w"]:
    """ref[*index, columns] of R rows, 0 where masked; `index` has scalars and arrays of R."""
    return triton.load(ref.at[*_spread(index, columns, mask)], mask=_across(mask, columns), other=0)


def scatter(
    ref: Any, index: tuple[Any, ...], columns: Int[Array, " w"], rows: Float[Array, "R w"], mask: Bool[Array, " R"]
) -> None:
    """Sets ref[*index, columns] to the rows, except where masked."""
    triton.store(ref.at[*_spread(index, columns, mask)], rows.astype(ref.dtype), mask=_across(mask, columns))


def _across(mask: Bool[Array, " R"], columns: Int[Array, " w"]) -> Bool[Array, "R w"]:
    return jnp.broadcast_to(mask[:, None], (mask.shape[0], columns.shape[0]))


def _spread(index: tuple[Any, ...], columns: Int[Array, " w"], mask: Bool[Array, " R"]) -> list[Any]:
    shape = (mask.shape[0], columns.shape[0])
    rows = [jnp.broadcast_to(i[:, None], shape) if getattr(i, "shape", ()) else i for i in index]
    return [*rows, jnp.broadcast_to(columns, shape)]


def before_any_key(rows: int, width: int) -> Sums:
    """The sums of no keys."""
    return jnp.full(rows, _LOWEST), jnp.zeros(rows), jnp.zeros((rows, width))


def add_sinks(sums: Sums, sinks: Float[Array, " R"], mine: Bool[Array, ""]) -> Sums:
    """Sums of no keys with a logit of each row that has no value, if it is this split's to count."""
    highest, total, accumulated = sums
    return jnp.where(mine, LOG2_E * sinks.astype(jnp.float32), highest), jnp.where(mine, 1.0, total), accumulated


def add_keys(
    sums: Sums, scores: Float[Array, "R S"], visible: Bool[Array, "R S"], values: Float[Array, "S dv"], exact: bool
) -> Sums:
    """The sums with those of a block of keys, whose values are finite throughout. Scores are in units of log 2."""
    highest, total, accumulated = sums
    scores = jnp.where(visible, scores, _LOWEST)
    new_highest = jnp.maximum(highest, scores.max(axis=1))
    weights = jnp.where(visible, jnp.exp2(scores - new_highest[:, None]), 0)
    shrink = jnp.exp2(highest - new_highest)
    update = dot(weights, values, exact)
    return new_highest, total * shrink + weights.sum(axis=1), accumulated * shrink[:, None] + update


def outputs(splits: int, rows: tuple[int, ...], width: int, dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """What `store` writes to: rows [*rows, width] if there is one split, else each split's sums."""
    if splits == 1:
        return [jax.ShapeDtypeStruct((*rows, width), dtype)]
    float32 = [(splits, *rows), (splits, *rows), (splits, *rows, width)]
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in float32]


def store(outs: tuple[Any, ...], split: Int[Array, ""], index: tuple[Any, ...], sums: Sums, mask: Bool[Array, " R"]):
    """Writes a program's sums of rows [*index] to its `outputs`, 0 for rows that saw no key."""
    highest, total, accumulated = sums
    columns = jnp.arange(accumulated.shape[1])
    if len(outs) == 1:
        scatter(outs[0], index, columns, accumulated / jnp.where(total > 0, total, 1)[:, None], mask)
        return
    index = (split, *index)
    spread = [i if getattr(i, "shape", ()) else jnp.broadcast_to(i, mask.shape) for i in index]
    for out, column in ((outs[0], highest), (outs[1], total)):
        triton.store(out.at[*spread], column, mask=mask)
    scatter(outs[2], index, columns, accumulated, mask)


def combined(outs: list[Array], dtype: Any, interpret: Any) -> Float[Array, "*rows dv"]:
    """The output of all splits together."""
    if len(outs) == 1:
        return outs[0]
    splits, *rows, width = outs[2].shape
    block = min(width, _COMBINED_COLUMNS)
    flat = [out.reshape(splits, math.prod(rows), *out.shape[1 + len(rows) :]) for out in outs]
    out = pl.pallas_call(
        functools.partial(_combine, block),
        grid=(width // block, math.prod(rows)),
        out_shape=jax.ShapeDtypeStruct((math.prod(rows), width), dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
        cost_estimate=pl.CostEstimate(
            flops=2 * flat[2].size, transcendentals=flat[0].size, bytes_accessed=4 * sum(x.size for x in flat)
        ),
        interpret=interpret,
        name="combine_splits",
    )(*flat)
    return out.reshape(*rows, width)


def _combine(block, highest, total, accumulated, out):
    """The arrays are whole: [S, N], [S, N], [S, N, dv] and [N, dv]."""
    splits, row = highest.shape[0], pl.program_id(1)
    columns = pl.program_id(0) * block + jnp.arange(block)
    split = jnp.arange(pl.next_power_of_2(splits))
    there = split < splits
    at = (split, jnp.broadcast_to(row, split.shape))
    highest = triton.load(highest.at[*at], mask=there, other=_LOWEST)
    shrink = jnp.exp2(highest - highest.max(axis=0))
    whole = (triton.load(total.at[*at], mask=there, other=0) * shrink).sum(axis=0)
    values = (gather(accumulated, at, columns, there) * shrink[:, None]).sum(axis=0)
    out[row, pl.ds(pl.program_id(0) * block, block)] = (values / jnp.where(whole > 0, whole, 1)).astype(out.dtype)
