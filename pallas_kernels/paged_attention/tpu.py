"""Grouped-query attention over paged keys and values on TPU.

Head widths that do not fill lane tiles are taken several heads together: each query is widened with zeros at the other
heads' lanes, and takes its own head's part of the output. The matrix unit would be as empty without.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import paged_fetch_tpu as fetch
from pallas_kernels import paged_softmax_tpu as softmax
from pallas_kernels import paging
from pallas_kernels.padding import zero_padding

# Rows of a group's matrix of queries, and of all groups' where one step takes them all.
_ROWS, _FEW_ROWS = 1024, 512
# Keys and values of a block in a step of few rows, whose time is that of memory; and most positions of any block.
_BLOCK_BYTES, _BLOCK_TOKENS = 2 << 20, 2048


def accepts(
    q: Array, k: Array, v: Array, k_pages: Array, v_pages: Array, layer: Any, page_table: Array, *_: Any, **options: Any
) -> str | None:
    """Why the kernel cannot run these arguments of `paged_attention`, or None."""
    return fetch.refusal((k_pages, v_pages), page_table, options.get("max_length"))


def heads_together(kv_heads: int, *widths: int) -> int:
    """Key heads of a group: the fewest whose keys and values, of these widths a head, fill whole lane tiles; or all."""
    fitting = [n for n in range(1, kv_heads) if kv_heads % n == 0 and all(n * w % fetch.LANES == 0 for w in widths)]
    return min(fitting, default=kv_heads)


def plan(
    tokens: int, heads: int, kv_heads: int, dim: int, value_dim: int, itemsize: int, page: int, width: int,
    window: int | None,
) -> softmax.Plan:  # fmt: skip
    """How a call of these sizes is cut."""
    together = heads_together(kv_heads, dim, value_dim)
    groups, group_heads = kv_heads // together, heads * together // kv_heads
    most = max(1, 1 << (_ROWS // group_heads).bit_length() - 1)
    block = min(1 << (tokens - 1).bit_length(), most)
    few = groups * group_heads * block <= _FEW_ROWS
    step_groups = groups if few else 1
    row_bytes = step_groups * together * (dim + value_dim) * itemsize
    reach = _BLOCK_TOKENS if window is None else min(_BLOCK_TOKENS, window + block + page - 2)
    pages = fetch.block_pages(page, row_bytes, width, _BLOCK_BYTES, reach if few else min(reach, 512))
    return softmax.Plan(block, step_groups, pages)


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
    interpret: Any = False,
) -> tuple[Float[Array, "B T Hq dv"], Float[Array, "L P page Hkv*d"], Float[Array, "L P page Hkv*dv"]]:
    """Arguments and result as in `pallas_kernels.paged_attention.paged_attention`; `interpret` as of `pallas_call`."""
    batch, tokens, heads, dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    k_pages, v_pages = (
        paging.write_rows(pages, rows.reshape(batch, tokens, -1), layer, page_table, starts, lengths)
        for pages, rows in ((k_pages, k), (v_pages, v))
    )
    page, width = k_pages.shape[2], page_table.shape[1]
    cut = plan(tokens, heads, kv_heads, dim, value_dim, k_pages.dtype.itemsize, page, width, window)
    together = heads_together(kv_heads, dim, value_dim)
    out = softmax.attend(
        softmax.grouped(q.astype(k_pages.dtype), kv_heads // together, cut.tokens),
        k_pages,
        v_pages,
        layer,
        page_table,
        starts,
        lengths,
        cut,
        softmax.rules(scale, window, soft_cap),
        value_dim=value_dim,
        together=together,
        sinks=None if sinks is None else jnp.repeat(sinks.reshape(kv_heads // together, -1), cut.tokens, axis=1),
        name="paged_attention_decode" if tokens == 1 else "paged_attention_prefill",
        interpret=interpret,
    )
    out = softmax.ungrouped(out, cut.tokens)[:, :tokens].astype(q.dtype)
    # A row without tokens is 0 already.
    return out if tokens == 1 else zero_padding(out, lengths), k_pages, v_pages
