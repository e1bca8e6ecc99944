"""Paged attention in plain XLA: time follows the actual context, the page table's width stays static."""

from jaxtyping import Array, Float, Int

from pallas_kernels import paging

# Keys per step of the loop.
BLOCK_TOKENS = 512


def paged_attention(
    q: Float[Array, "B T Hq d"],
    k: Float[Array, "B T Hkv d"],
    v: Float[Array, "B T Hkv dv"],
    k_pages: Float[Array, "L P page Hkv d"],
    v_pages: Float[Array, "L P page Hkv dv"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    max_length: int | None = None,
) -> tuple[Float[Array, "B T Hq dv"], Float[Array, "L P page Hkv d"], Float[Array, "L P page Hkv dv"]]:
    """See `pallas_kernels.paged_attention.paged_attention`."""
    k_pages = paging.write_rows(k_pages, k, layer, page_table, starts, lengths)
    v_pages = paging.write_rows(v_pages, v, layer, page_table, starts, lengths)
    page_size = k_pages.shape[2]

    def read_block(page_ids, written):
        return tuple(paging.read_pages(pages, layer, page_ids, written) for pages in (k_pages, v_pages))

    out = paging.attend_blocks(
        q,
        read_block,
        page_table,
        starts,
        lengths,
        page_size=page_size,
        block_pages=paging.block_pages(BLOCK_TOKENS, page_size, page_table.shape[1]),
        value_dim=v.shape[-1],
        num_kv_heads=k.shape[2],
        scale=scale,
        max_length=max_length,
    )
    return out.astype(q.dtype), k_pages, v_pages
