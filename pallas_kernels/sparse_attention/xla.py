"""Sparse attention in plain XLA: blocks of keys with a running top-k, then each query's chosen rows gathered.

Queries go through in tiles, so that neither the scores [queries, HI, keys] nor the gathered rows [queries, K, r] of a
long chunk are ever whole.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import paging, tiles
from pallas_kernels.padding import zero_padding


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
) -> tuple[Int[Array, "B T K"], Float[Array, "L P page dI"]]:
    """See `pallas_kernels.sparse_attention.index_top_k`."""
    batch, page_size = page_table.shape[0], pages.shape[2]
    count = min(top_k, page_table.shape[1] * page_size)
    # Every block is merged with the best so far: blocks twice as long as those keep the merging at half the work.
    width = max(1, min(max(paging.MIN_BLOCK_TOKENS, 2 * count) // page_size, page_table.shape[1]))
    block = width * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % width)))

    def choose(
        pages: Array, q: Float[Array, "B t HI dI"], weights: Float[Array, "B t HI"], seen: Int[Array, "B t"]
    ) -> tuple[Array, Int[Array, "B t K"]]:
        ends = seen.max(axis=1)
        # NaN in padded steps would be chosen, not ignored.
        q = jnp.where((seen > 0)[..., None, None], q, 0)
        weights = jnp.where((seen > 0)[..., None], weights, 0).astype(jnp.float32)

        def merge_block(index, pages, carry):
            best, chosen = carry
            page_ids = lax.dynamic_slice_in_dim(table, index * width, width, axis=1)
            positions = index * block + jnp.arange(block)
            keys = paging.read_pages(pages, layer, page_ids, positions < ends[:, None])
            each = jax.nn.relu(jnp.einsum("bthd,bsd->bths", q, keys, preferred_element_type=jnp.float32))
            scores = jnp.einsum("bths,bth->bts", each, weights)
            scores = jnp.where(positions < seen[..., None], scores, -jnp.inf)
            best, places = lax.top_k(jnp.concatenate([best, scores], axis=-1), count)
            positions = jnp.broadcast_to(positions, scores.shape)
            return best, jnp.take_along_axis(jnp.concatenate([chosen, positions], axis=-1), places, axis=-1)

        shape = (*seen.shape, count)
        carry = (jnp.full(shape, -jnp.inf), jnp.full(shape, -1, jnp.int32))
        blocks: int | Int[Array, ""] = (ends.max() + block - 1) // block
        if max_length is not None:
            blocks = min(math.ceil(max_length / block), table.shape[1] // width)
        (best, chosen), pages = paging.loop_with_pages(blocks, merge_block, carry, pages)
        return pages, jnp.where(best > -jnp.inf, chosen, -1)

    tile = tiles.steps(batch * index_q.shape[2] * block)
    pages, chosen = tiles.over(choose, tile, pages, *map(lax.stop_gradient, (index_q, index_weights)), seen)
    return chosen, pages


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
) -> tuple[Float[Array, "B T H dv"], Float[Array, "L P page r+dr"]]:
    """See `pallas_kernels.sparse_attention.sparse_latent_attention`.

    In the absorbed form: queries share no keys, so expanding latents would never pay.
    """
    rank = latent.shape[-1]
    new_rows = jnp.concatenate([latent, k_rope], axis=-1)
    pages = paging.write_rows(pages, new_rows, layer, page_table, starts, lengths)
    q_nope, q_rope = zero_padding(q_nope, lengths), zero_padding(q_rope, lengths)
    q = jnp.concatenate([jnp.einsum("bthd,hdr->bthr", q_nope, w_k), q_rope], axis=-1)

    def attend(
        pages: Array, q: Float[Array, "B t H r+dr"], chosen: Int[Array, "B t K"]
    ) -> tuple[Array, Float[Array, "B t H r+dr"]]:
        out, pages = paging.attend_chosen(q, pages, chosen, layer, page_table, scale=scale, max_length=max_length)
        return pages, out

    tile = tiles.steps(q.shape[0] * paging.MIN_BLOCK_TOKENS * (q.shape[2] + pages.shape[-1]))
    pages, out = tiles.over(attend, tile, pages, q, chosen)
    return jnp.einsum("bthr,hvr->bthv", out[..., :rank], w_v).astype(q_nope.dtype), pages
