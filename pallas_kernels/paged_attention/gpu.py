"""Paged attention on CUDA GPUs, in Pallas' Triton dialect: a program has some query rows of one key head, and takes the
pages of their sequence a block of keys at a time.

The query heads of a key head share its keys: a row is one step of one of them. New keys and values are written to
their pages first, by XLA in place, and then read like the others. A program begins at the first block of keys that its
rows see and ends at the last one, wherever pages begin and end; few rows share out their keys between programs
(`pallas_kernels.triton_softmax`). Products of bfloat16 pages round their factors to bfloat16, with float32 sums.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pallas_kernels import paging, triton_softmax
from pallas_kernels.triton_maths import dot


@dataclass(frozen=True)
class _Plan:
    """Static: query rows of a program, keys of a block, and between how many programs the keys are shared out."""

    rows: int
    keys: int
    row_blocks: int
    splits: int
    num_kv_heads: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool


def accepts(
    q: Array, k: Array, v: Array, k_pages: Array, v_pages: Array, *_: Array, max_length: int | None = None, **__: Any
) -> str | None:
    """Why the kernel cannot run these arguments of `paged_attention`, or None."""
    if max_length is not None:
        return "max_length asks for a form with a derivative"
    for name, width in (("head_dim", q.shape[3]), ("value_head_dim", v.shape[3])):
        if width not in (16, 32, 64, 128, 256):
            return f"{name} {width} is not 16, 32, 64, 128 or 256"
    return None


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
    """See `pallas_kernels.paged_attention.paged_attention`; `interpret` as of `pallas_call`."""
    batch, tokens, heads, dim = q.shape
    k_pages, v_pages = (
        paging.write_rows(pages, rows.reshape(batch, tokens, -1), layer, page_table, starts, lengths)
        for pages, rows in ((k_pages, k), (v_pages, v))
    )
    reach = page_table.shape[1] * k_pages.shape[2]
    if window is not None:
        reach = min(reach, window + tokens)
    plan = _plan(q, v, reach, scale=scale, window=window, soft_cap=soft_cap, has_sinks=sinks is not None)
    numbers = (jnp.asarray(layer, jnp.int32).reshape(1), page_table, starts, lengths)
    outs = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(plan.row_blocks * plan.splits, plan.num_kv_heads, batch),
        out_shape=triton_softmax.outputs(plan.splits, (batch, tokens, heads), v.shape[3], q.dtype),
        compiler_params=triton.CompilerParams(num_warps=8 if plan.rows > 64 else 4, num_stages=2),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * tokens * heads * reach * (dim + v.shape[3]),
            transcendentals=batch * tokens * heads * reach,
            bytes_accessed=batch * reach * sum(p.shape[3] * p.dtype.itemsize for p in (k_pages, v_pages))
            + sum(x.size * x.dtype.itemsize for x in (q, v)),
        ),
        interpret=interpret,
        name=f"paged_attention_{'decode' if tokens == 1 else 'prefill'}",
    )(*(x.astype(jnp.int32) for x in numbers), q, k_pages, v_pages, *([] if sinks is None else [sinks]))
    return triton_softmax.combined(outs, q.dtype, interpret), k_pages, v_pages


def _plan(q: Array, v: Array, reach: int, **options: Any) -> _Plan:
    batch, tokens, heads, dim = q.shape
    kv_heads = v.shape[2]
    wide = max(dim, v.shape[3]) > 128
    all_rows = tokens * heads // kv_heads
    rows = min(max(16, pl.next_power_of_2(all_rows)), 64 if wide else 128)
    keys = 32 if wide else 64
    row_blocks = pl.cdiv(all_rows, rows)
    splits = triton_softmax.splits(batch * kv_heads * row_blocks, pl.cdiv(reach, keys))
    return _Plan(rows, keys, row_blocks, splits, kv_heads, **options)


def _kernel(plan, layer, page_table, starts, lengths, q, k_pages, v_pages, *rest):
    """The arrays are whole, as `paged_attention` takes them."""
    (sinks,), outs = (rest[:1], rest[1:]) if plan.has_sinks else ((None,), rest)
    sequence, kv_head = pl.program_id(2), pl.program_id(1)
    split, block = pl.program_id(0) % plan.splits, plan.row_blocks - 1 - pl.program_id(0) // plan.splits
    group, dim, value_dim = q.shape[2] // plan.num_kv_heads, q.shape[3], outs[-1].shape[-1]
    page_size, exact = k_pages.shape[2], k_pages.dtype == jnp.float32
    start, length = starts[sequence], lengths[sequence]

    row = block * plan.rows + jnp.arange(plan.rows)
    step, head = row // group, kv_head * group + row % group
    real, last_seen = step < length, start + step
    query = triton_softmax.gather(q, (sequence, step, head), jnp.arange(dim), real)
    first_step = block * plan.rows // group
    last_step = jnp.minimum(((block + 1) * plan.rows - 1) // group, length - 1)
    end = jnp.where(first_step < length, start + last_step + 1, 0)
    first = 0 if plan.window is None else jnp.maximum(start + first_step - plan.window + 1, 0) // plan.keys
    blocks = jnp.maximum(pl.cdiv(end, plan.keys) - first, 0)

    def attend(index, sums):
        position = (first + index) * plan.keys + jnp.arange(plan.keys)
        there = position < end
        page = triton.load(page_table.at[sequence, position // page_size], mask=there, other=0)

        def read(pages, width):
            columns = kv_head * width + jnp.arange(width)
            return triton_softmax.gather(pages, (layer[0], page, position % page_size), columns, there)

        scores = dot(query, read(k_pages, dim).T, exact)
        if plan.soft_cap is None:
            scores = scores * (plan.scale * triton_softmax.LOG2_E)
        else:
            scores = plan.soft_cap * triton_softmax.LOG2_E * jnp.tanh(scores * (plan.scale / plan.soft_cap))
        visible = (position <= last_seen[:, None]) & real[:, None]
        if plan.window is not None:
            visible &= position > last_seen[:, None] - plan.window
        return triton_softmax.add_keys(sums, scores, visible, read(v_pages, value_dim), exact)

    sums = triton_softmax.before_any_key(plan.rows, value_dim)
    if sinks is not None:
        logits = triton.load(sinks.at[head], mask=real, other=0)
        sums = triton_softmax.add_sinks(sums, logits, split == 0)
    sums = jax.lax.fori_loop(*triton_softmax.share(split, plan.splits, blocks), attend, sums)
    triton_softmax.store(outs, split, (sequence, step, head), sums, step < q.shape[1])
