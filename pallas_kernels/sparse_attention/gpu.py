"""Sparse attention on CUDA GPUs, in Pallas' Triton dialect: scores of the indexer, and attention over chosen rows.

A program of the indexer reads a block of keys once, and takes queries one by one: their heads are the rows of a matrix
product. XLA chooses the best scores, some queries at a time. Attention over the chosen rows is that of
`pallas_kernels.latent_attention.gpu`, with every query a sequence of its own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pallas_kernels import paging, tiles, triton_softmax
from pallas_kernels.latent_attention import gpu as latent_gpu
from pallas_kernels.padding import token_mask
from pallas_kernels.triton_maths import dot

_INDEX_KEYS = 128
# Queries of one program of the indexer, and scores at a time: a quarter of a gigabyte.
_QUERIES = 16
_SCORES = 1 << 26


def accepts_index(
    index_q: Array, index_weights: Array, *_: Array, top_k: int, max_length: int | None = None
) -> str | None:
    """Why the kernel cannot run these arguments of `index_top_k`, or None."""
    for name, width in (("index heads", index_q.shape[2]), ("index head_dim", index_q.shape[3])):
        if width not in (16, 32, 64, 128):
            return f"{name} {width} is not 16, 32, 64 or 128"
    return None


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
    """See `pallas_kernels.sparse_attention.index_top_k`; `interpret` as of `pallas_call`."""
    batch = seen.shape[0]
    context = page_table.shape[1] * pages.shape[2]
    if max_length is not None:
        context = min(context, max_length)
    count = min(top_k, page_table.shape[1] * pages.shape[2])
    padding = max(count - context, 0)

    def choose(pages: Array, q: Array, weights: Array, seen: Array) -> tuple[Array, Int[Array, "B t K"]]:
        scores = _scores(q, weights, pages, layer, page_table, seen, context, interpret)
        best, chosen = jax.lax.top_k(scores, count - padding)
        chosen = jnp.where(best > -jnp.inf, chosen, -1)
        return pages, jnp.pad(chosen, ((0, 0), (0, 0), (0, padding)), constant_values=-1)

    pages, chosen = tiles.over(choose, max(1, _SCORES // (batch * context)), pages, index_q, index_weights, seen)
    return chosen, pages


def _scores(q, weights, pages, layer, page_table, seen, context: int, interpret: Any) -> Float[Array, "B T S"]:
    """Of each query and position, minus infinity for those not seen."""
    batch, tokens, heads, dim = q.shape
    numbers = (jnp.asarray(layer, jnp.int32).reshape(1), page_table, seen)
    return pl.pallas_call(
        functools.partial(_index_kernel, min(_QUERIES, tokens)),
        grid=(pl.cdiv(context, _INDEX_KEYS), pl.cdiv(tokens, _QUERIES), batch),
        out_shape=jax.ShapeDtypeStruct((batch, tokens, context), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * tokens * context * heads * (dim + 1),
            transcendentals=0,
            bytes_accessed=batch * context * (dim * pages.dtype.itemsize + tokens * 4)
            + sum(x.size * x.dtype.itemsize for x in (q, weights)),
        ),
        interpret=interpret,
        name="index_scores",
    )(*(x.astype(jnp.int32) for x in numbers), q, weights, pages)


def _index_kernel(queries, layer, page_table, seen, q, weights, pages, scores):
    """The arrays are whole; scores [B, T, S]."""
    sequence, page_size = pl.program_id(2), pages.shape[2]
    first = pl.program_id(1) * queries
    last = jnp.minimum(first + queries, q.shape[1])
    position = pl.program_id(0) * _INDEX_KEYS + jnp.arange(_INDEX_KEYS)
    exact = pages.dtype == jnp.float32
    head = jnp.arange(q.shape[2])

    def most(query, end):
        return jnp.maximum(end, seen[sequence, query])

    end = jax.lax.fori_loop(first, last, most, jnp.int32(0))
    there = position < end
    page = triton.load(page_table.at[sequence, position // page_size], mask=there, other=0)
    columns = jnp.arange(q.shape[3])
    keys = triton_softmax.gather(pages, (layer[0], page, position % page_size), columns, there)

    def score(query, _):
        sees = seen[sequence, query]
        # A padded step may hold NaN.
        real = jnp.broadcast_to(sees > 0, head.shape)
        rows = triton_softmax.gather(q, (sequence, query, head), columns, real)
        weight = triton.load(weights.at[sequence, query, head], mask=real, other=0).astype(jnp.float32)
        each = jnp.maximum(dot(rows, keys.T, exact), 0) * weight[:, None]
        total = jnp.where(position < sees, each.sum(axis=0), -jnp.inf)
        triton.store(scores.at[sequence, query, position], total, mask=position < scores.shape[2])
        return _

    jax.lax.fori_loop(first, last, score, 0)


def accepts(*arguments: Array, scale: float, max_length: int | None = None) -> str | None:
    """Why the kernel cannot run these arguments of `sparse_latent_attention`, or None."""
    return latent_gpu.accepts(*arguments, scale=scale, max_length=max_length)


def sparse_latent_attention(
    q_nope: Float[Array, "B T H dn"],
    q_rope: Float[Array, "B T H dr"],
    latent: Float[Array, "B T r"],
    k_rope: Float[Array, "B T dr"],
    w_k: Float[Array, "H dn r"],
    w_v: Float[Array, "H dv r"],
    pages: Float[Array, "L P page r+dr"],
    chosen: Int[Array, "B T K"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    max_length: int | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "L P page r+dr"]]:
    """See `pallas_kernels.sparse_attention.sparse_latent_attention`; `interpret` as of `pallas_call`."""
    new_rows = jnp.concatenate([latent, k_rope], axis=-1)
    pages = paging.write_rows(pages, new_rows, layer, page_table, starts, lengths)
    q_latent = jnp.einsum("bthd,hdr->bthr", q_nope, w_k)
    batch, tokens, heads, rank = q_latent.shape
    plan = latent_gpu.make_plan(batch * tokens, heads, chosen.shape[2], scale)
    counts = jnp.where(token_mask(lengths, tokens), (chosen >= 0).sum(axis=2), 0)
    numbers = (jnp.asarray(layer, jnp.int32).reshape(1), page_table, chosen, counts)
    outs = pl.pallas_call(
        functools.partial(_attend_kernel, plan),
        grid=(plan.row_blocks, plan.splits, batch * tokens),
        out_shape=triton_softmax.outputs(plan.splits, q_latent.shape[:3], rank, q_nope.dtype),
        compiler_params=triton.CompilerParams(num_warps=8 if plan.rows > 16 else 4, num_stages=2),
        cost_estimate=pl.CostEstimate(
            flops=2 * heads * chosen.size * (rank + pages.shape[3]),
            transcendentals=heads * chosen.size,
            bytes_accessed=chosen.size * pages.shape[3] * pages.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for x in (q_latent, q_rope, q_latent)),
        ),
        interpret=interpret,
        name="sparse_latent_attention",
    )(*(x.astype(jnp.int32) for x in numbers), q_latent, q_rope, pages)
    out = triton_softmax.combined(outs, q_nope.dtype, interpret)
    return jnp.einsum("bthr,hvr->bthv", out, w_v).astype(q_nope.dtype), pages


def _attend_kernel(plan, layer, page_table, chosen, counts, q_latent, q_rope, pages, *outs):
    """The arrays are whole, as `sparse_latent_attention` takes them; the first `counts` of `chosen` are positions."""
    tokens, page_size = q_latent.shape[1], pages.shape[2]
    sequence, step = pl.program_id(2) // tokens, pl.program_id(2) % tokens
    head = pl.program_id(0) * plan.rows + jnp.arange(plan.rows)
    real, count = head < q_latent.shape[2], counts[sequence, step]

    def place(index):
        number = index * latent_gpu.KEYS + jnp.arange(latent_gpu.KEYS)
        there = number < count
        position = triton.load(chosen.at[sequence, step, number], mask=there, other=0)
        page = triton.load(page_table.at[sequence, position // page_size], mask=there, other=0)
        return page, position % page_size, there, jnp.broadcast_to(there, (plan.rows, latent_gpu.KEYS))

    at, split, blocks = (sequence, step, head), pl.program_id(1), pl.cdiv(count, latent_gpu.KEYS)
    # Padded steps have no positions, and may hold NaN.
    reads = real & (count > 0)
    sums = latent_gpu.attend(plan, layer[0], split, blocks, place, q_latent, q_rope, pages, at, reads)
    triton_softmax.store(outs, split, at, sums, real)
