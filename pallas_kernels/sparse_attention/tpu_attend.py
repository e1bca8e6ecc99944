"""Latent attention over chosen rows on TPU, by the kernel of `latent_attention` and the bits of what is chosen.

A row of a page shares its tiles in HBM with others, so no row can be copied alone. Many queries, which together choose
rows nearly everywhere, read all of their context once and mask what they did not choose. One query, or a few of a
sequence, with a context much longer than what they choose, read the groups of rows, as many as make a tile, that hold a
chosen one: these are the pages of a sequence made up of them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import paged_fetch_tpu as fetch
from pallas_kernels import paging
from pallas_kernels.latent_attention import tpu as latent_tpu
from pallas_kernels.padding import token_mask, zero_padding

# Queries of a sequence that go through the groups that any of them chose.
_FEW_TOKENS = 8
# A context of so many times what its queries choose is gathered. One row of 16 chosen at random leaves out a third of
# the groups of 16, and neighbours are chosen together.
_GATHERED = 16
_NONE = jnp.iinfo(jnp.int32).max


def accepts(
    q_nope: Array, q_rope: Array, latent: Array, k_rope: Array, w_k: Array, w_v: Array, pages: Array, chosen: Array,
    layer: Any, page_table: Array, *_: Any, **options: Any,
) -> str | None:  # fmt: skip
    """Why the kernel cannot run these arguments of `sparse_latent_attention`, or None."""
    dense = (q_nope, q_rope, latent, k_rope, w_k, w_v, pages, layer, page_table)
    return latent_tpu.accepts(*dense, **options)


def gathers(tokens: int, top_k: int, page: int, width: int, height: int) -> bool:
    """Whether a call fetches groups of `height` rows: one of so many queries a sequence, positions of each, rows of a
    page and entries of the page table."""
    pieces = page // height
    # Both tables of a sequence are in SMEM together.
    fit = 4 * (width + min(tokens * top_k, width * pieces)) <= fetch.TABLE_BYTES
    long = tokens <= _FEW_TOKENS and page * width >= _GATHERED * tokens * top_k
    return long and fit and pieces.bit_count() == 1


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
    tokens, page = q_nope.shape[1], pages.shape[2]
    new_rows = jnp.concatenate([latent, k_rope], axis=-1)
    pages = paging.write_rows(pages, new_rows, layer, page_table, starts, lengths)
    chosen = jnp.where(token_mask(lengths, tokens)[..., None], chosen, -1)
    height = 32 // pages.dtype.itemsize
    pieces = page // height
    options: dict[str, Any] = {
        "scale": scale, "interpret": interpret,
        "name": "sparse_latent_attention_decode" if tokens == 1 else "sparse_latent_attention_prefill",
    }  # fmt: skip
    if gathers(tokens, chosen.shape[2], page, page_table.shape[1], height):
        rows = pages.reshape(*pages.shape[:1], -1, height, pages.shape[3])
        groups, chosen, ends = gathered(chosen, page_table.shape[1] * pieces, height)
        options |= {"whole_pages": page_table, "pieces": pieces}
        where = (groups, ends - lengths, lengths)
    else:
        rows, where = pages, (page_table, starts, lengths)
    out = latent_tpu.attend(q_nope, q_rope, w_k, w_v, rows, layer, *where, chosen=chosen, **options)
    return zero_padding(out, lengths), pages


class Gathered(NamedTuple):
    """Of each sequence: numbers of groups of rows; the choice among their rows; and how many rows there are."""

    groups: Int[Array, "B n"]
    chosen: Int[Array, "B T m"]
    ends: Int[Array, "B"]


def gathered(chosen: Int[Array, "B T K"], most: int, height: int) -> Gathered:
    """The sequences made up of those groups of `height` rows that hold a chosen one, in ascending order, of at the most
    `most` that there are."""
    batch, tokens, top_k = chosen.shape
    queries = jnp.arange(tokens)[:, None]
    ordered = jnp.where(chosen >= 0, chosen * tokens + queries, _NONE).reshape(batch, -1)
    ordered = jax.lax.sort(ordered, is_stable=False)
    real = ordered < _NONE
    position, query = ordered // tokens, ordered % tokens
    group = jnp.where(real, position // height, _NONE)
    new = real & (group != jnp.pad(group, ((0, 0), (1, 0)), constant_values=-1)[:, :-1])
    place = (jnp.cumsum(new, axis=1) - 1) * height + position % height
    own = jnp.where(real[:, None] & (query[:, None] == queries), place[:, None], -1)
    groups = jax.lax.sort(jnp.where(new, group, _NONE), is_stable=False)
    # Rows after the last chosen one may never have been written.
    ends = jnp.where(real, place + 1, 0).max(axis=1)
    return Gathered(groups[:, : min(tokens * top_k, most)], own, ends)
