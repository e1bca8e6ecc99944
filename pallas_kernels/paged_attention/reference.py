"""Paged attention as its definition reads: one softmax over the whole context of each query, in float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def write_tokens(
    pages: Float[Array, "L P page *row"],
    rows: Float[Array, "B T *row"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
) -> Float[Array, "L P page *row"]:
    """One token after the other: row (b, t) at position starts[b] + t if t < lengths[b]."""
    page_size, tokens = pages.shape[2], rows.shape[1]

    def write(index, pages):
        b, t = index // tokens, index % tokens
        position = starts[b] + t
        at = (layer, page_table[b, position // page_size], position % page_size)
        return pages.at[at].set(jnp.where(t < lengths[b], rows[b, t].astype(pages.dtype), pages[at]))

    return lax.fori_loop(0, rows.shape[0] * tokens, write, pages)


def read_context(
    pages: Float[Array, "L P page *row"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
) -> Float[Array, "B N *row"]:
    """Every sequence's rows in order of position, in float32; 0 where it has no token. N = W * page."""
    rows = pages[layer, page_table].astype(jnp.float32)
    rows = rows.reshape(rows.shape[0], -1, *rows.shape[3:])
    has_token = jnp.arange(rows.shape[1]) < (starts + lengths)[:, None]
    return jnp.where(has_token.reshape(*has_token.shape, *[1] * (rows.ndim - 2)), rows, 0)


def attend(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B N H d"],
    v: Float[Array, "B N H dv"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " H"] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B T H dv"]:
    """softmax(scale * q k^T) v where the query of step t sees positions up to starts[b] + t; 0 for padded steps.

    `window`, `sinks` and `soft_cap` as `pallas_kernels.paged_attention.paged_attention` defines them.
    """
    steps = jnp.arange(q.shape[1])
    real = steps < lengths[:, None]
    distance = (starts[:, None] + steps)[:, :, None] - jnp.arange(k.shape[1])
    # Padded steps see everything: a softmax over nothing would have no gradient.
    visible = (distance >= 0) & (distance < (window or distance.shape[-1])) | ~real[:, :, None]
    q = jnp.where(real[:, :, None, None], q.astype(jnp.float32), 0)
    scores = scale * jnp.einsum("bthd,bnhd->bhtn", q, k)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    out = jnp.einsum("bhtn,bnhv->bthv", weights, v)
    return jnp.where(real[:, :, None, None], out, 0)


def paged_attention(
    q: Float[Array, "B T Hq d"],
    k: Float[Array, "B T Hkv d"],
    v: Float[Array, "B T Hkv dv"],
    k_pages: Float[Array, "L P page Hkv*d"],
    v_pages: Float[Array, "L P page Hkv*dv"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    max_length: int | None = None,
    window: int | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B T Hq dv"], Float[Array, "L P page Hkv*d"], Float[Array, "L P page Hkv*dv"]]:
    """See `pallas_kernels.paged_attention.paged_attention`."""
    batch, tokens, kv_heads, _ = k.shape
    group = q.shape[2] // kv_heads

    def write(pages, rows):
        return write_tokens(pages, rows.reshape(batch, tokens, -1), layer, page_table, starts, lengths)

    def read(pages):
        rows = read_context(pages, layer, page_table, starts, lengths)
        return jnp.repeat(rows.reshape(*rows.shape[:2], kv_heads, -1), group, axis=2)

    k_pages, v_pages = write(k_pages, k), write(v_pages, v)
    out = attend(q, read(k_pages), read(v_pages), starts, lengths, scale, window, sinks, soft_cap)
    return out.astype(q.dtype), k_pages, v_pages
