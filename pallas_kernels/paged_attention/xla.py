"""Paged attention in plain XLA: time follows the actual context, the page table's width stays static."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import paging

# Up to this many queries (T * Hq) of a sequence: rather than bring each head's keys together, which copies them, let
# every query see the rows of all heads as they lie, with zeros at other heads' places, and take its own head's part of
# the output. That multiplies Hkv times as much in a product that is bound by reading.
FEW_QUERY_ROWS = 16


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
    batch, tokens, heads, _ = q.shape
    kv_heads = k.shape[2]
    k_pages, v_pages = (
        paging.write_rows(pages, rows.reshape(batch, tokens, -1), layer, page_table, starts, lengths)
        for pages, rows in ((k_pages, k), (v_pages, v))
    )
    few = tokens * heads <= FEW_QUERY_ROWS

    def read_block(pages, page_ids, written):
        keys, values = (paging.read_pages(one, layer, page_ids, written) for one in pages)
        parts = 1 if few else kv_heads
        return _split_heads(keys, parts), _split_heads(values, parts)

    out, (k_pages, v_pages) = paging.attend_blocks(
        _widen_queries(q, kv_heads) if few else q,
        (k_pages, v_pages),
        read_block,
        page_table,
        starts,
        lengths,
        page_size=k_pages.shape[2],
        num_kv_heads=1 if few else kv_heads,
        value_dim=v.shape[-1] * (kv_heads if few else 1),
        scale=scale,
        max_length=max_length,
        window=window,
        sinks=sinks,
        soft_cap=soft_cap,
    )
    if few:
        out = out.reshape(batch, tokens, kv_heads, heads // kv_heads, kv_heads, -1)
        out = jnp.einsum("btkgkv->btkgv", out).reshape(batch, tokens, heads, -1)
    return out.astype(q.dtype), k_pages, v_pages


def _split_heads(rows: Float[Array, "B S H*d"], heads: int) -> Float[Array, "B H S d"]:
    return rows.reshape(*rows.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _widen_queries(q: Float[Array, "B T Hq d"], kv_heads: int) -> Float[Array, "B T Hq Hkv*d"]:
    batch, tokens, heads, dim = q.shape
    own = jnp.arange(heads)[:, None] // (heads // kv_heads) == jnp.arange(kv_heads)
    return jnp.where(own[:, :, None], q[:, :, :, None], 0).reshape(batch, tokens, heads, kv_heads * dim)
