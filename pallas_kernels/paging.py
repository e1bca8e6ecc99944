"""Token-indexed memory in pages: writing rows in place, reading blocks, and softmax attention over them.

Position p of a sequence lies in page `page_table[b, p // page]`, row `p % page`. Page 0 is the null page: entries of
the table past a sequence's end are 0, and whatever it or any unwritten row holds (NaN included) reaches no result.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.padding import token_mask, zero_padding

# Stands for minus infinity in a running maximum, where a difference of two infinities would be NaN.
_LOWEST = -1e30

MIN_BLOCK_TOKENS = 128
# Up to this many queries (T * Hq) of a sequence, scores are small beside the keys and values of a block.
FEW_QUERY_ROWS = 64


def write_rows(
    pages: Float[Array, "L P page *row"],
    rows: Float[Array, "B T *row"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
) -> Float[Array, "L P page *row"]:
    """Rows of the real tokens at positions starts[b].. of their sequences; padded tokens write nothing.

    A scatter, which XLA does in place when `pages` is donated.
    """
    page_size, tokens = pages.shape[2], rows.shape[1]
    positions = starts[:, None] + jnp.arange(tokens)
    page = jnp.take_along_axis(page_table, positions // page_size, axis=1, mode="clip")
    outside = pages.shape[1]
    page = jnp.where(token_mask(lengths, tokens), page, outside)
    return pages.at[layer, page, positions % page_size].set(rows.astype(pages.dtype), mode="drop")


def read_pages(
    pages: Float[Array, "L P page *row"],
    layer: int | Int[Array, ""],
    page_ids: Int[Array, "B n"],
    written: Bool[Array, "B S"],
) -> Float[Array, "B S *row"]:
    """The rows of n pages of each sequence, one after the other: S = n * page. 0 where no token was written."""
    block = pages[layer, page_ids]
    block = block.reshape(block.shape[0], -1, *block.shape[3:])
    return jnp.where(written.reshape(*written.shape, *[1] * (block.ndim - 2)), block, 0)


def block_pages(query_rows: int, batch: int, page_size: int, table_width: int) -> int:
    """How many pages make a block of keys: at least one, at most the whole table.

    Tuned on CPUs: few query rows per sequence want long blocks, a quarter as long when several sequences share the
    cache; many query rows have scores that want to stay in it.
    """
    tokens = MIN_BLOCK_TOKENS if query_rows > FEW_QUERY_ROWS else max(MIN_BLOCK_TOKENS, 4 * MIN_BLOCK_TOKENS // batch)
    return max(1, min(tokens // page_size, table_width))


Pages = TypeVar("Pages")
Carry = TypeVar("Carry")
# Of query rows [B, Hkv, R]: running maximum, sum of exponentials, and their weighted sum of values [B, Hkv, R, dv].
SoftmaxSums = tuple[Float[Array, "B Hkv R"], Float[Array, "B Hkv R"], Float[Array, "B Hkv R dv"]]


def loop_with_pages(
    count: int | Int[Array, ""], body: Callable[[Int[Array, ""], Pages, Carry], Carry], carry: Carry, pages: Pages
) -> tuple[Carry, Pages]:
    """`carry = body(index, pages, carry)` for each index below count. With a Python int it can be differentiated.

    The pages go through the loop and come out of it: were they read by the loop and then written by the next layer,
    XLA would keep a copy of all of them for the loop. The barrier keeps JAX from taking them out again.
    """
    if isinstance(count, int):
        return lax.fori_loop(0, count, jax.checkpoint(lambda index, carry: body(index, pages, carry)), carry), pages

    def threaded(index, carry):
        pages = lax.optimization_barrier(carry[1])
        return body(index, pages, carry[0]), pages

    return lax.fori_loop(0, count, threaded, (carry, pages))


def attend_blocks(
    q: Float[Array, "B T Hq d"],
    pages: Pages,
    read_block: Callable[
        [Pages, Int[Array, "B n"], Bool[Array, "B S"]], tuple[Float[Array, "B Hkv S d"], Float[Array, "B Hkv S dv"]]
    ],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    page_size: int,
    num_kv_heads: int,
    value_dim: int,
    scale: float,
    max_length: int | None,
    window: int | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    soft_cap: float | None = None,
    before: SoftmaxSums | None = None,
) -> tuple[Float[Array, "B T Hq dv"], Pages]:
    """Causal softmax attention with a running maximum and sum (Milakov and Gimelshein 2018, as in FlashAttention).

    The query of step t is at position starts[b] + t and sees keys up to it, with `window` the last `window` of them.
    `read_block` turns the pages, the ids of n of them, and which of their rows hold a token, into keys and values that
    are finite throughout. A sequence's loop begins at the first page that its first query sees, and all end after as
    many blocks as the longest takes; with `max_length`, a Python int no smaller than any starts + lengths, the trip
    count is static and the loop can be differentiated. `before`: the sums over keys that are not in pages, in place of
    sinks. Accumulates in float32. Padded steps give 0. Returns the pages as well, for the caller to go on with.
    """
    batch, tokens, heads, _ = q.shape
    width = block_pages(tokens * heads, batch, page_size, page_table.shape[1])
    block = width * page_size
    ends = jnp.where(lengths > 0, starts + lengths, 0)
    first_page = jnp.zeros_like(starts) if window is None else jnp.maximum(starts - window + 1, 0) // page_size
    # Padded steps see no key at all.
    last_seen = jnp.where(token_mask(lengths, tokens), starts[:, None] + jnp.arange(tokens), -1)
    group = heads // num_kv_heads
    last_seen = jnp.tile(last_seen, (1, group))[:, None, :, None]
    # The queries of one key head are rows of one matrix: group by group, each with its T steps.
    queries = zero_padding(q, lengths).reshape(batch, tokens, num_kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(batch, num_kv_heads, group * tokens, -1)

    def attend_block(index, pages, carry):
        highest, total, accumulated = carry
        places = first_page[:, None] + index * width + jnp.arange(width)
        page_ids = jnp.take_along_axis(page_table, places, axis=1, mode="fill", fill_value=0)
        positions = (first_page * page_size + index * block)[:, None] + jnp.arange(block)
        keys, values = read_block(pages, page_ids, positions < ends[:, None])
        scores = scale * jnp.einsum("bkrd,bksd->bkrs", queries, keys, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        positions = positions[:, None, None, :]
        visible = positions <= last_seen
        if window is not None:
            visible &= positions > last_seen - window
        scores = jnp.where(visible, scores, _LOWEST)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - new_highest[..., None]), 0)
        shrink = jnp.exp(highest - new_highest)
        total = total * shrink + weights.sum(axis=-1)
        weights = weights.astype(values.dtype)
        update = jnp.einsum("bkrs,bksv->bkrv", weights, values, preferred_element_type=jnp.float32)
        return new_highest, total, accumulated * shrink[..., None] + update

    rows = queries.shape[:-1]
    carry = before or (*_before_any_key(sinks, rows, tokens), jnp.zeros((*rows, value_dim)))
    blocks: int | Int[Array, ""] = ((ends - first_page * page_size).max() + block - 1) // block
    if max_length is not None:
        reach = max_length if window is None else min(max_length, page_size + window + tokens - 2)
        blocks = math.ceil(min(reach, page_table.shape[1] * page_size) / block)
    carry, pages = loop_with_pages(blocks, attend_block, carry, pages)
    _, total, accumulated = carry
    out = accumulated / jnp.where(total > 0, total, 1)[..., None]
    out = out.reshape(batch, num_kv_heads, group, tokens, value_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, tokens, heads, value_dim), pages


def _before_any_key(
    sinks: Float[Array, " Hq"] | None, rows: tuple[int, ...], tokens: int
) -> tuple[Float[Array, "B Hkv R"], Float[Array, "B Hkv R"]]:
    """Running maximum and sum of query rows [B, Hkv, group * T] to begin with: of nothing, or of a head's sink."""
    if sinks is None:
        return jnp.full(rows, _LOWEST), jnp.zeros(rows)
    per_row = jnp.repeat(sinks.astype(jnp.float32).reshape(rows[1], -1), tokens, axis=1)
    return jnp.broadcast_to(per_row, rows), jnp.ones(rows)


def attend_chosen(
    q: Float[Array, "B T H d"],
    pages: Float[Array, "L P page d"],
    chosen: Int[Array, "B T K"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    *,
    scale: float,
    max_length: int | None = None,
    before: SoftmaxSums | None = None,
) -> tuple[Float[Array, "B T H d"], Float[Array, "L P page d"]]:
    """As `attend_blocks`, over each query's chosen positions alone, whose rows are key and value of all heads.

    `chosen[b, t]`: distinct positions in any order, then -1. `before`: sums of rows [B * T, 1, H]. A query without any
    key gives 0.
    """
    page_size, count = pages.shape[2], (chosen >= 0).sum(axis=-1).reshape(-1)
    page = jnp.take_along_axis(page_table[:, None], chosen // page_size, axis=2, mode="clip")
    row_ids = jnp.where(chosen >= 0, page * page_size + chosen % page_size, 0)

    def read_rows(pages, row_ids, written):
        rows = pages[layer, row_ids // page_size, row_ids % page_size]
        rows = jnp.where(written[..., None], rows, 0)[:, None]
        return rows, rows

    # Each query is a sequence of its own, and each of its chosen rows a page of one token: it sees all of them.
    out, pages = attend_blocks(
        q.reshape(-1, 1, *q.shape[2:]),
        pages,
        read_rows,
        row_ids.reshape(-1, row_ids.shape[-1]),
        count - 1,
        (count > 0).astype(jnp.int32),
        page_size=1,
        num_kv_heads=1,
        value_dim=q.shape[-1],
        scale=scale,
        max_length=None if max_length is None else chosen.shape[-1],
        before=before,
    )
    return out.reshape(q.shape), pages
