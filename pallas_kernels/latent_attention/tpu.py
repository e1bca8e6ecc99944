"""Latent attention on TPU, absorbed: queries and outputs move into latent space, where all heads share a stored row as
their key, and its latent as their value. A row is fetched once for both."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import paged_softmax_tpu as softmax
from pallas_kernels import paging

# Rows of a step's matrix of queries: heads x tokens.
_ROWS = 1024
_BLOCK_BYTES, _BLOCK_TOKENS = 2 << 20, 2048


def accepts(
    q_nope: Array, q_rope: Array, latent: Array, k_rope: Array, w_k: Array, w_v: Array, pages: Array, layer: Any,
    page_table: Array, *_: Any, **options: Any,
) -> str | None:  # fmt: skip
    """Why the kernel cannot run these arguments of `latent_attention`, or None."""
    rank = latent.shape[2]
    if rank % softmax.LANES:
        return f"a latent of {rank} is not a multiple of {softmax.LANES}"
    return softmax.refusal((pages,), page_table, options.get("max_length"))


def plan(tokens: int, heads: int, row_width: int, itemsize: int, page: int, width: int) -> softmax.Plan:
    """How a call of these sizes is cut."""
    most = max(1, 1 << (_ROWS // heads).bit_length() - 1)
    block = min(1 << (tokens - 1).bit_length(), most)
    reach = _BLOCK_TOKENS if heads * block <= _ROWS // 4 else _BLOCK_TOKENS // 2
    return softmax.Plan(block, 1, softmax.block_pages(page, row_width * itemsize, width, _BLOCK_BYTES, reach))


def latent_attention(
    q_nope: Float[Array, "B T H dn"],
    q_rope: Float[Array, "B T H dr"],
    latent: Float[Array, "B T r"],
    k_rope: Float[Array, "B T dr"],
    w_k: Float[Array, "H dn r"],
    w_v: Float[Array, "H dv r"],
    pages: Float[Array, "L P page r+dr"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    max_length: int | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "L P page r+dr"]]:
    """As `pallas_kernels.latent_attention.latent_attention`; `interpret` as of `pallas_call`."""
    (batch, tokens, heads, _), rank = q_nope.shape, latent.shape[2]
    new_rows = jnp.concatenate([latent, k_rope], axis=-1)
    pages = paging.write_rows(pages, new_rows, layer, page_table, starts, lengths)
    cut = plan(tokens, heads, pages.shape[3], pages.dtype.itemsize, pages.shape[2], page_table.shape[1])
    q_nope, q_rope = paging.zero_padding(q_nope, lengths), paging.zero_padding(q_rope, lengths)
    absorbed = jnp.einsum("bthd,hdr->bthr", q_nope, w_k)
    q = jnp.concatenate([absorbed, q_rope], axis=-1).astype(pages.dtype)
    blocks = pl.cdiv(tokens, cut.tokens)
    q = jnp.pad(q, [(0, 0), (0, blocks * cut.tokens - tokens), (0, 0), (0, 0)])
    q = q.reshape(batch, blocks, cut.tokens, heads, -1).transpose(0, 1, 3, 2, 4)
    out = softmax.attend(
        q.reshape(batch, blocks, 1, heads * cut.tokens, -1),
        pages,
        None,
        layer,
        page_table,
        starts,
        lengths,
        cut,
        softmax.rules(scale),
        value_dim=rank,
        name="latent_attention_decode" if tokens == 1 else "latent_attention_prefill",
        interpret=interpret,
    )
    out = out.reshape(batch, blocks, heads, cut.tokens, rank).transpose(0, 1, 3, 2, 4)
    out = jnp.einsum("bthr,hvr->bthv", out.reshape(batch, -1, heads, rank)[:, :tokens], w_v)
    return paging.zero_padding(out, lengths).astype(q_nope.dtype), pages
