"""Latent attention in plain XLA, in the cheaper of two forms.

Absorbed: queries and outputs move into latent space (q w_k, and w_v after the sum), so that all heads share the stored
rows as one key head. Expanded: each block's latents become keys and values of every head, once for all T queries.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import paging
from pallas_kernels.padding import zero_padding


def expansion_pays(tokens: int, nope_dim: int, value_dim: int, latent_dim: int) -> bool:
    """Whether T queries are cheaper with expanded keys and values, by multiplications per head and key.

    Expanded: r (dn + dv) once, then dn + dr + dv for each query. Absorbed: 2 r + dr for each query.
    """
    saved_per_query = 2 * latent_dim - nope_dim - value_dim
    return tokens * saved_per_query > latent_dim * (nope_dim + value_dim)


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
) -> tuple[Float[Array, "B T H dv"], Float[Array, "L P page r+dr"]]:
    """See `pallas_kernels.latent_attention.latent_attention`."""
    new_rows = jnp.concatenate([latent, k_rope], axis=-1)
    pages = paging.write_rows(pages, new_rows, layer, page_table, starts, lengths)
    heads, value_dim, rank = w_v.shape
    expand = expansion_pays(q_nope.shape[1], q_nope.shape[-1], value_dim, rank)

    def read_shared(pages, page_ids, written):
        # The rope keys are summed along as if they were values, and dropped at the end: cheaper than cutting them off
        # each block.
        rows = paging.read_pages(pages, layer, page_ids, written)[:, None]
        return rows, rows

    def read_expanded(pages, page_ids, written):
        rows = paging.read_pages(pages, layer, page_ids, written)
        latents, rope = rows[..., :rank], rows[:, None, :, rank:]
        keys = jnp.einsum("bsr,hdr->bhsd", latents, w_k)
        values = jnp.einsum("bsr,hvr->bhsv", latents, w_v)
        return jnp.concatenate([keys, jnp.broadcast_to(rope, (*keys.shape[:3], rope.shape[-1]))], axis=-1), values

    q_nope, q_rope = zero_padding(q_nope, lengths), zero_padding(q_rope, lengths)
    first = q_nope if expand else jnp.einsum("bthd,hdr->bthr", q_nope, w_k)
    out, pages = paging.attend_blocks(
        jnp.concatenate([first, q_rope], axis=-1),
        pages,
        read_expanded if expand else read_shared,
        page_table,
        starts,
        lengths,
        page_size=pages.shape[2],
        num_kv_heads=heads if expand else 1,
        value_dim=value_dim if expand else pages.shape[-1],
        scale=scale,
        max_length=max_length,
    )
    if not expand:
        out = jnp.einsum("bthr,hvr->bthv", out[..., :rank], w_v)
    return out.astype(q_nope.dtype), pages
