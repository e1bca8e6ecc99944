"""Latent attention as its definition reads: keys and values of every head and position, one softmax, in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.reference import attend, read_context, write_tokens


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
    rank = latent.shape[-1]
    pages = write_tokens(pages, jnp.concatenate([latent, k_rope], axis=-1), layer, page_table, starts, lengths)
    rows = read_context(pages, layer, page_table, starts, lengths)
    keys = jnp.einsum("bnr,hdr->bnhd", rows[..., :rank], w_k.astype(jnp.float32))
    values = jnp.einsum("bnr,hvr->bnhv", rows[..., :rank], w_v.astype(jnp.float32))
    rope = jnp.broadcast_to(rows[:, :, None, rank:], (*keys.shape[:3], k_rope.shape[-1]))
    q = jnp.concatenate([q_nope, q_rope], axis=-1)
    out = attend(q, jnp.concatenate([keys, rope], axis=-1), values, starts, lengths, scale)
    return out.astype(q_nope.dtype), pages
