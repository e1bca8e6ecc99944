"""Latent attention on TPU, in the cheaper of two forms; rows are fetched once for keys and values.

Absorbed: queries and outputs move into latent space, where all heads share a stored row as their key and its latent as
their value. Expanded, for many tokens: each block's latents become a head's keys and values in VMEM, once for all
tokens of a grid step.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import chosen_words_tpu, paging
from pallas_kernels import paged_fetch_tpu as fetch
from pallas_kernels import paged_softmax_tpu as softmax
from pallas_kernels.latent_attention.xla import expansion_pays
from pallas_kernels.padding import zero_padding

# Rows of a step's matrix of queries: heads x tokens.
_ROWS = 1024
_BLOCK_BYTES, _BLOCK_TOKENS = 2 << 20, 2048


def accepts(
    q_nope: Array, q_rope: Array, latent: Array, k_rope: Array, w_k: Array, w_v: Array, pages: Array, layer: Any,
    page_table: Array, *_: Any, **options: Any,
) -> str | None:  # fmt: skip
    """Why the kernel cannot run these arguments of `latent_attention`, or None."""
    rank = latent.shape[2]
    if rank % fetch.LANES:
        return f"a latent of {rank} is not a multiple of {fetch.LANES}"
    return fetch.refusal((pages,), page_table, options.get("max_length"))


def expands(tokens: int, nope_dim: int, value_dim: int, rank: int) -> bool:
    """Whether a call of so many tokens a row takes the expanded form."""
    tiled = nope_dim % fetch.LANES == 0 and value_dim % fetch.LANES == 0
    return tiled and expansion_pays(min(tokens, _ROWS), nope_dim, value_dim, rank)


def plan(
    tokens: int, heads: int, row_width: int, itemsize: int, page: int, width: int, chooses: bool = False
) -> softmax.Plan:
    """How a call is cut whose steps take so many heads together: all of them, or one, where latents are expanded.

    `chooses`: of what each query attends to, a block takes whole tiles of words.
    """
    most = max(1, 1 << (_ROWS // heads).bit_length() - 1)
    block = min(1 << (tokens - 1).bit_length(), most)
    reach = _BLOCK_TOKENS if heads * block <= _ROWS // 4 else _BLOCK_TOKENS // 4
    unit = chosen_words_tpu.fewest_keys(block) if chooses else fetch.LANES
    return softmax.Plan(block, 1, fetch.block_pages(page, row_width * itemsize, width, _BLOCK_BYTES, reach, unit))


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
    tokens = q_nope.shape[1]
    new_rows = jnp.concatenate([latent, k_rope], axis=-1)
    pages = paging.write_rows(pages, new_rows, layer, page_table, starts, lengths)
    out = attend(
        q_nope, q_rope, w_k, w_v, pages, layer, page_table, starts, lengths, scale=scale,
        name="latent_attention_decode" if tokens == 1 else "latent_attention_prefill", interpret=interpret,
    )  # fmt: skip
    return out if tokens == 1 else zero_padding(out, lengths), pages


def attend(
    q_nope: Float[Array, "B T H dn"],
    q_rope: Float[Array, "B T H dr"],
    w_k: Float[Array, "H dn r"],
    w_v: Float[Array, "H dv r"],
    pages: Float[Array, "L P page r+dr"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    chosen: Int[Array, "B T K"] | None = None,
    whole_pages: Int[Array, "B V"] | None = None,
    pieces: int = 1,
    name: str,
    interpret: Any = False,
) -> Float[Array, "B T H dv"]:
    """What `latent_attention` returns, over rows written already, and anything finite for padded steps.

    chosen: the positions that each query attends to instead of all, then -1, none of them for padded steps.
    whole_pages, pieces: as of `paged_softmax_tpu.attend`.
    """
    (_, tokens, heads, nope_dim), (_, value_dim, rank) = q_nope.shape, w_v.shape
    expand = expands(tokens, nope_dim, value_dim, rank)
    groups = heads if expand else 1
    (page, row_width), width = pages.shape[2:], page_table.shape[1]
    cut = plan(tokens, heads // groups, row_width, pages.dtype.itemsize, page, width, chosen is not None)
    choice = None
    if chosen is not None:
        reach = pl.cdiv(width, cut.pages) * cut.pages * page
        choice = chosen_words_tpu.pack(chosen, cut.tokens, reach, interpret)
    first = q_nope if expand else jnp.einsum("bthd,hdr->bthr", q_nope, w_k)
    out = softmax.attend(
        softmax.grouped(jnp.concatenate([first, q_rope], axis=-1).astype(pages.dtype), groups, cut.tokens),
        pages,
        None,
        layer,
        page_table,
        starts,
        lengths,
        cut,
        softmax.rules(scale),
        value_dim=value_dim if expand else rank,
        expansion=jnp.concatenate([w_k, w_v], axis=1).transpose(0, 2, 1).astype(pages.dtype) if expand else None,
        choice=choice,
        whole_pages=whole_pages,
        pieces=pieces,
        name=name,
        interpret=interpret,
    )
    out = softmax.ungrouped(out, cut.tokens)[:, :tokens]
    if not expand:
        out = jnp.einsum("bthr,hvr->bthv", out, w_v)
    return out.astype(q_nope.dtype)
