"""The lightning indexer on TPU: a sequence's index keys are read once for some queries, whose scores stay in VMEM.

Scores are products of the matrix unit, all heads of the queries against a block of keys, then weighted and added up
over heads in float32. Which are the best is found there too (`tpu_select`): no score is ever written to memory.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import paged_fetch_tpu as fetch
from pallas_kernels.paged_fetch_tpu import LANES
from pallas_kernels.sparse_attention import tpu_select

# Rows of a step's matrix of queries, heads x tokens; keys of a block, whole registers of scores; bytes of all scores.
_ROWS, _KEYS, _MANY_KEYS = 1024, 1024, 4096
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


@dataclass(frozen=True)
class Plan:
    """Of one grid step: query tokens, blocks of keys, and rows of 128 scores that its queries may have."""

    tokens: int
    keyed: fetch.Blocks
    rows: int


def plan(tokens: int, heads: int, page: int, width: int) -> Plan:
    """How a call of these sizes is cut."""
    most = max(1, _ROWS // heads)
    reach = pl.cdiv(page * width, tpu_select.ROWS * LANES) * tpu_select.ROWS
    most = min(most, _SCORE_BYTES // (4 * LANES * reach)) or 1
    block = min(1 << (tokens - 1).bit_length(), 1 << most.bit_length() - 1)
    keys = _MANY_KEYS if heads * block <= _ROWS // 4 else _KEYS
    pages = fetch.block_pages(page, 1, width, keys, keys, _KEYS)
    keyed = fetch.Blocks(page, pages, width)
    blocks = pl.cdiv(page * width, keyed.keys)
    return Plan(block, keyed, pl.cdiv(blocks * keyed.keys, tpu_select.ROWS * LANES) * tpu_select.ROWS)


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
    fitting = fetch.TABLE_BYTES // (4 * width)
    cut = plan(tokens, heads, page, width)
    count = min(top_k, width * page)
    blocks = pl.cdiv(tokens, cut.tokens)
    padding = ((0, 0), (0, blocks * cut.tokens - tokens))
    q = jnp.pad(index_q.astype(pages.dtype), (*padding, (0, 0), (0, 0)))
    q = q.reshape(batch, blocks, cut.tokens, heads, -1)
    weights = jnp.pad(index_weights.astype(jnp.float32), (*padding, (0, 0))).reshape(batch, blocks, cut.tokens, heads)
    if _heads_first(cut.tokens):
        q, weights = q.swapaxes(2, 3), weights.swapaxes(2, 3)
    q, weights = q.reshape(batch, blocks, -1, q.shape[4]), weights.reshape(batch, blocks, 1, -1)
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (0, -weights.shape[3] % LANES)))
    seen = jnp.pad(seen.astype(jnp.int32), padding).reshape(batch, blocks, cut.tokens)
    parts = [slice(first, first + fitting) for first in range(0, batch, fitting)]
    chosen = [
        _choose(q[part], weights[part], pages, layer, page_table[part], seen[part], cut, count, interpret)
        for part in parts
    ]
    return jnp.concatenate(chosen).reshape(batch, blocks * cut.tokens, -1)[:, :tokens, :count], pages


def _heads_first(tokens: int) -> bool:
    """Whether rows of queries go by heads, then tokens: sums over heads then stay within a register's rows."""
    return tokens % 8 == 0


def _choose(q, weights, pages, layer, page_table, seen, cut: Plan, count: int, interpret) -> Int[Array, "B N t _"]:
    (batch, blocks, rows, dim), keyed = q.shape, cut.keyed
    steps = batch * blocks
    cores = 2 if steps % 2 == 0 else 1
    places = pl.cdiv(count, tpu_select.PLACES) * tpu_select.PLACES // LANES
    limits = jnp.broadcast_to(seen.reshape(steps, cut.tokens, 1), (steps, cut.tokens, LANES))
    once = keyed.page * keyed.table_width

    def place(core, step, *_):
        return core * (steps // cores) + step, 0, 0

    out = pl.pallas_call(
        lambda *refs: _kernel(cut, blocks, count, *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cores, steps // cores),
            in_specs=[
                pl.BlockSpec((None, rows, dim), place),
                pl.BlockSpec((None, 1, weights.shape[3]), place),
                pl.BlockSpec((None, cut.tokens, LANES), place),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((None, cut.tokens, places, LANES), lambda *at: (*place(*at), 0)),
            scratch_shapes=[
                pltpu.VMEM((2, keyed.keys, dim), pages.dtype),
                pltpu.VMEM((cut.tokens, cut.rows, LANES), jnp.int32),
                pltpu.VMEM((weights.shape[3], LANES), jnp.float32),
                pltpu.VMEM((cut.tokens, 1, LANES), jnp.int32),
                pltpu.VMEM((cut.tokens, 1, LANES), jnp.int32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((1, 2)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((steps, cut.tokens, places, LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True
        ),
        # Of full tables: how many keys a call reads is known only when it runs.
        cost_estimate=pl.CostEstimate(
            flops=2 * steps * rows * once * (dim + 1),
            transcendentals=0,
            bytes_accessed=steps * once * dim * pages.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for x in (q, weights, limits))
            + 4 * steps * cut.tokens * places * LANES,
        ),
        interpret=interpret,
        name="index_top_k",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        page_table.astype(jnp.int32).reshape(-1),
        seen.reshape(steps, cut.tokens).max(axis=1),
        q.reshape(steps, rows, dim),
        weights.reshape(steps, 1, -1),
        limits,
        pages,
    )
    return out.reshape(batch, blocks, cut.tokens, places * LANES)


def _kernel(
    cut: Plan, blocks: int, count: int, layer, table, ends, q, weights, seen, pages, out, buffer, keys, columns, least,
    last, kept_slot, semaphores,
):  # fmt: skip
    """Blocks: q [t HI, dI]; weights [1, t HI], columns [t HI, 128]; seen [t, 128]; out [t, n, 128]; buffer [2, S, dI];
    keys [t, R, 128]; least, last [t, 1, 128]."""
    step, keyed = pl.program_id(1), cut.keyed
    steps = pl.num_programs(1)
    number = pl.program_id(0) * steps + step
    copies = fetch.Fetch(keyed, layer[0], (table,), (pages,), (buffer,), semaphores)

    def span(number):
        row = number if blocks == 1 else jax.lax.div(number, jnp.int32(blocks))
        return keyed.span(row, 0, 0, ends[number], number)

    here = span(number)

    @pl.when(step == 0)
    def _():
        kept_slot[0] = 0
        copies.start(here, 0, 0)

    for first in range(0, columns.shape[0], LANES):
        row = weights[:, first : first + LANES]
        columns[first : first + LANES] = jnp.broadcast_to(row, (LANES, LANES)).T
    rows = here.count * (keyed.keys // LANES)
    tail = jax.lax.div(rows - 1, tpu_select.ROWS) * tpu_select.ROWS
    keys[:, pl.ds(pl.multiple_of(tail, tpu_select.ROWS), tpu_select.ROWS)] = jnp.full(
        (cut.tokens, tpu_select.ROWS, LANES), tpu_select.UNSEEN, jnp.int32
    )

    def score(index, slot):
        _score(index, buffer[slot], q, columns, seen, keys)

    following = span(jnp.minimum(number + 1, pl.num_programs(0) * steps - 1))
    kept_slot[0] = copies.through(here, following, step + 1 == steps, kept_slot[0], score)
    least[...], last[...] = tpu_select.limits(keys, rows, count)
    pl.loop(0, cut.tokens)(lambda token: tpu_select.compact(keys, rows, least, last, token, out))


def _score(index, block: Float[Array, "S dI"], q, columns, seen, keys) -> None:
    """A block's scores, as integers of their order, into its rows of `keys`."""
    (rows, _), tokens, count = q.shape, keys.shape[0], block.shape[0]
    precision = "highest" if q.dtype == jnp.float32 else None
    each = jax.lax.dot_general(
        q[...], block, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    for tile in range(count // LANES):
        first = index * count + tile * LANES
        part = jnp.maximum(each[:, tile * LANES : (tile + 1) * LANES], 0) * columns[:rows]
        if _heads_first(tokens):
            total = part.reshape(rows // tokens, tokens, LANES).sum(axis=0)
        else:
            total = part.reshape(tokens, rows // tokens, LANES).sum(axis=1)
        position = first + jax.lax.broadcasted_iota(jnp.int32, total.shape, 1)
        key = jnp.where(position < seen[...], tpu_select.ordered(total), tpu_select.UNSEEN)
        keys[:, pl.ds(jax.lax.div(first, LANES), 1)] = key[:, None]
