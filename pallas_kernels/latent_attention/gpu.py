"""Latent attention on CUDA GPUs, in Pallas' Triton dialect and in the absorbed form: a program has some query rows, and
takes the latents of their sequence a block at a time, as the keys of all heads and, once read, as their values.

Queries and outputs move into and out of latent space in XLA. New latents are written to their pages first, by XLA in
place, and then read like the others. A row is one step of one head; few rows share out their keys between programs
(`pallas_kernels.triton_softmax`). Products of bfloat16 pages round their factors to bfloat16, with float32 sums.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pallas_kernels import paging, triton_softmax
from pallas_kernels.triton_maths import dot

# Keys of a block, and query rows of a program at the most: the sums of rows x 512 fill the registers.
KEYS = 32
_MAX_ROWS = 64


@dataclass(frozen=True)
class Plan:
    """Static: query rows of a program, of how many blocks, and between how many programs the keys are shared out."""

    rows: int
    row_blocks: int
    splits: int
    scale: float


def accepts(
    q_nope: Array, q_rope: Array, latent: Array, *_: Array, scale: float, max_length: int | None = None
) -> str | None:
    """Why the kernel cannot run these arguments of `latent_attention`, or None."""
    if max_length is not None:
        return "max_length asks for a form with a derivative"
    for name, width in (("latent_dim", latent.shape[2]), ("rope_dim", q_rope.shape[3])):
        if width not in (16, 32, 64, 128, 256, 512):
            return f"{name} {width} is not 16, 32, 64, 128, 256 or 512"
    return None


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
    """See `pallas_kernels.latent_attention.latent_attention`; `interpret` as of `pallas_call`."""
    new_rows = jnp.concatenate([latent, k_rope], axis=-1)
    pages = paging.write_rows(pages, new_rows, layer, page_table, starts, lengths)
    q_latent = jnp.einsum("bthd,hdr->bthr", q_nope, w_k)
    batch, tokens, heads, rank = q_latent.shape
    reach = page_table.shape[1] * pages.shape[2]
    plan = make_plan(batch, tokens * heads, reach, scale)
    numbers = (jnp.asarray(layer, jnp.int32).reshape(1), page_table, starts, lengths)
    outs = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(plan.row_blocks, plan.splits, batch),
        out_shape=triton_softmax.outputs(plan.splits, q_latent.shape[:3], rank, q_nope.dtype),
        compiler_params=triton.CompilerParams(num_warps=8 if plan.rows > 16 else 4, num_stages=2),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * tokens * heads * reach * (rank + pages.shape[3]),
            transcendentals=batch * tokens * heads * reach,
            bytes_accessed=batch * reach * pages.shape[3] * pages.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for x in (q_latent, q_rope, q_latent)),
        ),
        interpret=interpret,
        name=f"latent_attention_{'decode' if tokens == 1 else 'prefill'}",
    )(*(x.astype(jnp.int32) for x in numbers), q_latent, q_rope, pages)
    out = triton_softmax.combined(outs, q_nope.dtype, interpret)
    return jnp.einsum("bthr,hvr->bthv", out, w_v).astype(q_nope.dtype), pages


def make_plan(sequences: int, rows_each: int, reach: int, scale: float) -> Plan:
    """For `sequences` of so many query rows that see `reach` keys at the most."""
    rows = min(max(16, pl.next_power_of_2(rows_each)), _MAX_ROWS)
    row_blocks = pl.cdiv(rows_each, rows)
    return Plan(rows, row_blocks, triton_softmax.splits(sequences * row_blocks, pl.cdiv(reach, KEYS)), scale)


def _kernel(plan, layer, page_table, starts, lengths, q_latent, q_rope, pages, *outs):
    """The arrays are whole, as `latent_attention` takes them, with queries in latent space."""
    sequence, split, block = pl.program_id(2), pl.program_id(1), plan.row_blocks - 1 - pl.program_id(0)
    heads, page_size, start, length = q_latent.shape[2], pages.shape[2], starts[sequence], lengths[sequence]
    row = block * plan.rows + jnp.arange(plan.rows)
    step, head = row // heads, row % heads
    real = step < length
    last_step = jnp.minimum(((block + 1) * plan.rows - 1) // heads, length - 1)
    end = jnp.where(block * plan.rows // heads < length, start + last_step + 1, 0)

    def place(index):
        position = index * KEYS + jnp.arange(KEYS)
        there = position < end
        page = triton.load(page_table.at[sequence, position // page_size], mask=there, other=0)
        return page, position % page_size, there, (position <= (start + step)[:, None]) & real[:, None]

    at = (sequence, step, head)
    sums = attend(plan, layer[0], split, pl.cdiv(end, KEYS), place, q_latent, q_rope, pages, at, real)
    triton_softmax.store(outs, split, at, sums, step < q_latent.shape[1])


def attend(
    plan: Plan, layer: Any, split: Any, blocks: Any, place: Callable[[Any], tuple[Array, Array, Array, Array]],
    q_latent: Any, q_rope: Any, pages: Any, at: tuple[Any, ...], real: Array,
) -> triton_softmax.Sums:  # fmt: skip
    """The sums of a program's rows, whose queries are at [*at], over its split's share of so many blocks of keys.

    `place(index)`: of a block's keys, their pages, places in the pages, whether there is one, and which rows see it.
    """
    rank, rope, exact = q_latent.shape[3], q_rope.shape[3], pages.dtype == jnp.float32
    latent_columns, rope_columns = jnp.arange(rank), rank + jnp.arange(rope)
    first = triton_softmax.gather(q_latent, at, latent_columns, real)
    second = triton_softmax.gather(q_rope, at, jnp.arange(rope), real)

    def block(index, sums):
        page, row, there, visible = place(index)
        latents = triton_softmax.gather(pages, (layer, page, row), latent_columns, there)
        ropes = triton_softmax.gather(pages, (layer, page, row), rope_columns, there)
        scores = dot(first, latents.T, exact) + dot(second, ropes.T, exact)
        return triton_softmax.add_keys(sums, scores * (plan.scale * triton_softmax.LOG2_E), visible, latents, exact)

    sums = triton_softmax.before_any_key(plan.rows, rank)
    return jax.lax.fori_loop(*triton_softmax.share(split, plan.splits, blocks), block, sums)
