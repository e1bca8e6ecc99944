"""Sparse attention as its definition reads: scores of all keys, then one softmax over the chosen ones, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.reference import read_context, write_tokens


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
    keys = read_context(pages, layer, page_table, jnp.zeros_like(page_table[:, 0]), seen.max(axis=1))
    each = jax.nn.relu(jnp.einsum("bthd,bnd->bthn", index_q.astype(jnp.float32), keys))
    scores = jnp.einsum("bthn,bth->btn", each, index_weights.astype(jnp.float32))
    scores = jnp.where(jnp.arange(keys.shape[1]) < seen[..., None], scores, -jnp.inf)
    best, chosen = jax.lax.top_k(scores, min(top_k, keys.shape[1]))
    return jnp.where(best > -jnp.inf, chosen, -1), pages


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
    """See `pallas_kernels.sparse_attention.sparse_latent_attention`."""
    rank = latent.shape[-1]
    pages = write_tokens(pages, jnp.concatenate([latent, k_rope], axis=-1), layer, page_table, starts, lengths)
    rows = read_context(pages, layer, page_table, starts, lengths)
    keys = jnp.einsum("bnr,hdr->bnhd", rows[..., :rank], w_k.astype(jnp.float32))
    values = jnp.einsum("bnr,hvr->bnhv", rows[..., :rank], w_v.astype(jnp.float32))
    real = (jnp.arange(q_nope.shape[1]) < lengths[:, None])[..., None, None]
    q_nope, q_rope = (jnp.where(real, q.astype(jnp.float32), 0) for q in (q_nope, q_rope))
    scores = jnp.einsum("bthd,bnhd->bthn", q_nope, keys) + jnp.einsum("bthd,bnd->bthn", q_rope, rows[..., rank:])
    visible = (chosen[..., None] == jnp.arange(rows.shape[1])).any(axis=2)[:, :, None] | ~real
    weights = jax.nn.softmax(jnp.where(visible, scale * scores, -jnp.inf), axis=-1)
    out = jnp.where(real, jnp.einsum("bthn,bnhv->bthv", weights, values), 0)
    return out.astype(latent.dtype), pages
