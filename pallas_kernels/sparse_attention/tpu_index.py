"""The lightning indexer on TPU: a sequence's index keys are read once for some queries, whose scores stay in VMEM.

Scores are products of the matrix unit, all heads of the queries against a block of keys, then weighted and added up
over heads in float32. Which are the best is found there too (`tpu_select`): no score is ever written to memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import paged_fetch_tpu as fetch
from pallas_kernels.paged_fetch_tpu import LANES
from pallas_kernels.sparse_attention import tpu_scores, tpu_select
from pallas_kernels.sparse_attention.tpu_scores import PIECE, Plan

# Rows of a sequence's matrix of queries, heads x tokens; keys of a block, for many rows and for few; queries of several
# sequences that choose side by side; bytes of all scores.
_ROWS, _KEYS, _MANY_KEYS, _QUERIES = 1024, 1024, 4096, 8
_SCORE_BYTES = 16 << 20
_VMEM_BYTES = 48 << 20


def accepts(
    index_q: Array, index_weights: Array, pages: Array, layer: Any, page_table: Array, seen: Array, *, top_k: int,
    max_length: int | None = None,
) -> str | None:  # fmt: skip
    """Why the kernel cannot run these arguments of `index_top_k`, or None."""
    heads, dim = index_q.shape[2:]
    if dim % LANES:
        return f"index head_dim {dim} is not a multiple of {LANES}"
    if heads % 8:
        return f"{heads} index heads are not a multiple of 8"
    context = page_table.shape[1] * pages.shape[2]
    if context * 4 > _SCORE_BYTES:
        return f"scores of {context} positions are more than {_SCORE_BYTES >> 20} MiB"
    return fetch.refusal((pages,), page_table, max_length)


def plan(batch: int, tokens: int, heads: int, page: int, width: int) -> Plan:
    """How a call of these sizes is cut."""
    most = max(1, _ROWS // heads)
    reach = tpu_select.padded(pl.cdiv(page * width, LANES))
    fitting = max(1, _SCORE_BYTES // (4 * LANES * reach))
    most = min(most, fitting)
    block = min(1 << (tokens - 1).bit_length(), 1 << most.bit_length() - 1)
    # Two cores are to have a step each.
    together = max(1, min(_QUERIES // block, fitting // block, pl.cdiv(batch, 2), _table_rows(width)))
    sequences = 1 << together.bit_length() - 1 if tokens <= block else 1
    keys = _MANY_KEYS if heads * block <= _ROWS // 4 else _KEYS
    keyed = fetch.Blocks(page, fetch.block_pages(page, 1, width, keys, keys, PIECE), width)
    rows = pl.cdiv(page * width, keyed.keys) * keyed.keys // LANES
    return Plan(sequences, block, pl.cdiv(tokens, block), keyed, tpu_select.padded(rows))


def index_top_k(
    index_q: Float[Array, "B T HI dI"],
    index_weights: Float[Array, "B T HI"],
    pages: Float[Array, "L P page dI"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    seen: Int[Array, "B T"],
    *,
    top_k: int,
    max_length: int | None = None,
    interpret: Any = False,
) -> tuple[Int[Array, "B T K"], Float[Array, "L P page dI"]]:
    """See `pallas_kernels.sparse_attention.index_top_k`; the positions ascend. `interpret` as of `pallas_call`.

    One kernel for as many rows as have their page tables in SMEM together.
    """
    (batch, tokens, heads, _), (page, width) = index_q.shape, (pages.shape[2], page_table.shape[1])
    cut, count = plan(batch, tokens, heads, page, width), min(top_k, width * page)
    padding = ((0, 0), (0, cut.parts * cut.tokens - tokens))
    q = jnp.pad(index_q.astype(pages.dtype), (*padding, (0, 0), (0, 0)))
    q = q.reshape(batch, cut.parts, cut.tokens, heads, -1)
    weights = jnp.pad(index_weights.astype(jnp.float32), (*padding, (0, 0)))
    weights = weights.reshape(batch, cut.parts, cut.tokens, heads)
    if cut.heads_first:
        q, weights = q.swapaxes(2, 3), weights.swapaxes(2, 3)
    q, weights = q.reshape(batch, cut.parts, -1, q.shape[4]), weights.reshape(batch, cut.parts, -1)
    seen = jnp.pad(seen.astype(jnp.int32), padding).reshape(batch, cut.parts, cut.tokens)
    # Pages are numbered over all layers.
    table = page_table.astype(jnp.int32) + jnp.asarray(layer, jnp.int32) * pages.shape[1]
    pool, most = pages.reshape(-1, *pages.shape[2:]), _table_rows(width) // cut.sequences * cut.sequences
    kernels = [
        _choose(cut, count, interpret, pool, *(x[first : first + most] for x in (q, weights, table, seen)))
        for first in range(0, batch, most)
    ]
    return jnp.concatenate(kernels).reshape(batch, cut.parts * cut.tokens, -1)[:, :tokens, :count], pages


def _table_rows(width: int) -> int:
    """Rows of this width that a page table in SMEM has at the most."""
    return fetch.TABLE_BYTES // (4 * width)


def _choose(cut: Plan, count: int, interpret, pool, *rows: Array) -> Int[Array, "B N t _"]:
    """Of queries [B, N, t HI, dI], weights [B, N, t HI], tables [B, W] and keys seen [B, N, t]."""
    batch = rows[0].shape[0]
    # Sequences of no keys complete the last step.
    filling = -batch % cut.sequences
    q, weights, table, seen = (jnp.pad(x, ((0, filling), *[(0, 0)] * (x.ndim - 1))) for x in rows)
    steps, keyed = (batch + filling) * cut.parts // cut.sequences, cut.keyed
    cores = 2 if steps % 2 == 0 else 1
    places = pl.cdiv(count, tpu_select.PLACES) * tpu_select.PLACES // LANES
    limits = jnp.broadcast_to(seen.reshape(steps, cut.queries, 1), (steps, cut.queries, LANES))
    q = q.reshape(steps, cut.sequences, *q.shape[2:])
    weights = weights.reshape(steps, 1, -1)
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, -weights.shape[2] % LANES)))
    once = keyed.page * keyed.table_width * cut.sequences

    def place(dims):
        return lambda core, step, *_: (core * (steps // cores) + step, *[0] * (dims - 1))

    out = pl.pallas_call(
        lambda *refs: _kernel(cut, count, *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, steps // cores),
            in_specs=[
                *(pl.BlockSpec((None, *x.shape[1:]), place(x.ndim)) for x in (q, weights, limits)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((None, cut.queries, places, LANES), place(4)),
            scratch_shapes=[
                pltpu.VMEM((2, keyed.keys, pool.shape[2]), pool.dtype),
                pltpu.VMEM((cut.queries, cut.rows, LANES), jnp.int32),
                pltpu.VMEM((weights.shape[2], LANES), jnp.float32),
                pltpu.VMEM((cut.queries, 1, LANES), jnp.int32),
                pltpu.VMEM((cut.queries, 1, LANES), jnp.int32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((steps, cut.queries, places, LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True
        ),
        # Of full tables: how many keys a call reads is known only when it runs.
        cost_estimate=pl.CostEstimate(
            flops=2 * q.size * (once // cut.sequences),
            transcendentals=0,
            bytes_accessed=steps * once * pool.shape[2] * pool.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for x in (q, weights, limits))
            + 4 * steps * cut.queries * places * LANES,
        ),
        interpret=interpret,
        name="index_top_k",
    )(jnp.pad(table.reshape(-1), (0, keyed.pages)), seen.max(axis=2).reshape(-1), q, weights, limits, pool)
    return out.reshape(-1, cut.parts, cut.tokens, places * LANES)[:batch]


def _kernel(
    cut: Plan, count: int, table, ends, q, weights, seen, pages, out, buffer, keys, columns, least, last, kept_slot,
    semaphores,
):  # fmt: skip
    """Blocks: q [n, t HI, dI]; weights [1, n t HI], columns [n t HI, 128]; seen [n t, 128]; out [n t, m, 128]; buffer
    [2, S, dI]; keys [n t, R, 128]; least, last [n t, 1, 128]."""
    for first in range(0, columns.shape[0], LANES):
        row = weights[:, first : first + LANES]
        columns[first : first + LANES] = jnp.broadcast_to(row, (LANES, LANES)).T
    number = (pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)) * cut.sequences
    longest = functools.reduce(jnp.maximum, [ends[number + own] for own in range(cut.sequences)])
    rows = tpu_select.padded(cut.scored(longest))
    tpu_scores.write(cut, rows, table, ends, q, columns, seen, pages, keys, buffer, kept_slot, semaphores)
    least[...], last[...] = tpu_select.limits(keys, rows, count)
    pl.loop(0, cut.queries)(lambda query: tpu_select.compact(keys, rows, least, last, query, out))
