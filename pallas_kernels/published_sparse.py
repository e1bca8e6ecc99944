"""Published models' shapes for sparse attention: a decode step, a verification and a prefill of what a chip holds.

What is fewest to move is each query's chosen rows, those of a chunk's queries together at most once.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.latent_attention import tpu as latent_tpu
from pallas_kernels.published_case import PREFILL_TOKENS, Case, total_bytes
from pallas_kernels.sparse_attention import (
    index_top_k,
    sparse_latent_attention,
    tpu_attend,
    tpu_index,
    tpu_scores,
    tpu_select,
)

PAGE, TOP_K, INDEX_DIM, LANES = 64, 2048, 128, 128
# Of the pool, whatever the batch: sequences share pages, as those that come of one prefix do.
POOL_TOKENS = 1 << 21
SHORT, LONG = 8192, 131072


@dataclass(frozen=True)
class SparseModel:
    """Heads of a chip and of the indexer, which no chip shares; widths of a key's two parts, a value and a latent."""

    heads: int
    index_heads: int = 64
    nope: int = 128
    rope: int = 64
    value: int = 128
    rank: int = 512


SPARSE_MODELS = {
    "DeepSeek-V3.2": SparseModel(128),
    "DeepSeek-V3.2, a chip of 8": SparseModel(16),
    "GLM-5, a chip of 8": SparseModel(8, 32, 192, 64, 256, 512),
}


def _array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _named(name: str, context: int) -> str:
    return f"{name}, {context // 1024}k"


def _place(batch: int, context: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Layer and page table."""
    return _array(dtype=jnp.int32), _array(batch, context // PAGE, dtype=jnp.int32)


def _pages(width: int) -> jax.ShapeDtypeStruct:
    return _array(1, 1 + POOL_TOKENS // PAGE, PAGE, width)


def index_case(name: str, batch: int, tokens: int, context: int) -> Case:
    """One call of `index_top_k` for the last `tokens` of a context."""
    heads = SPARSE_MODELS[name].index_heads
    pages = _pages(INDEX_DIM)
    q, weights = _array(batch, tokens, heads * INDEX_DIM), _array(batch, tokens, heads)
    arguments = (q, weights, pages, *_place(batch, context), _array(batch, tokens, dtype=jnp.int32))

    def call(q, *rest):
        return index_top_k(q.reshape(*q.shape[:2], heads, -1), *rest, top_k=TOP_K)

    cut = tpu_index.plan(batch, tokens, heads, PAGE, context // PAGE)
    steps = pl.cdiv(batch, cut.sequences) * cut.parts
    out = _array(batch, tokens, TOP_K, dtype=jnp.int32)
    keys = batch * context * INDEX_DIM * pages.dtype.itemsize
    return Case(
        "index_top_k", _named(name, context), "decode" if tokens == 1 else "prefill", call, arguments, 2,
        batch * tokens, steps, 0, keys + total_bytes(q, weights, out),
        batch * _seen(tokens, context) * heads * INDEX_DIM, loops=_index_loops(cut, context),
    )  # fmt: skip


def _index_loops(cut: tpu_scores.Plan, context: int) -> tuple[int, ...]:
    """Trips of the loops of a step of the indexer, in the order of the code, without ties and with full tables."""
    rows = pl.cdiv(context, cut.keyed.keys) * cut.keyed.keys // LANES
    blocks = pl.cdiv(rows, tpu_select.rows_counted(cut.queries))
    compacted = pl.cdiv(rows, tpu_select.ROWS)
    # Places that lie in two stretches of rows are filled by both.
    filled = TOP_K // tpu_select.places_filled(cut.rows, TOP_K) + compacted - 1
    sequences = () if cut.sequences == 1 else (cut.sequences,)
    each = () if cut.queries == 1 else (cut.queries,)
    score = cut.sequences * pl.cdiv(context, cut.keyed.keys)
    return (
        *sequences, score, 0, 0, 32, 32 * blocks, blocks, blocks, 0, 0, *each, cut.queries * compacted,
        cut.queries * filled
    )  # fmt: skip


def sparse_latent_attention_case(name: str, batch: int, tokens: int, context: int) -> Case:
    """One call of `sparse_latent_attention`, the last `tokens` of a context, each with `TOP_K` chosen."""
    model = SPARSE_MODELS[name]
    heads, width = model.heads, model.rank + model.rope
    queries = _array(batch, tokens, heads * model.nope), _array(batch, tokens, heads * model.rope)
    new = _array(batch, tokens, model.rank), _array(batch, tokens, model.rope)
    weights = _array(heads, model.nope, model.rank), _array(heads, model.value, model.rank)
    pages, chosen = _pages(width), _array(batch, tokens, TOP_K, dtype=jnp.int32)
    rows = _array(batch, dtype=jnp.int32)

    def call(q_nope, q_rope, *rest):
        q_nope, q_rope = (x.reshape(*x.shape[:2], heads, -1) for x in (q_nope, q_rope))
        out, pages = sparse_latent_attention(q_nope, q_rope, *rest, scale=(model.nope + model.rope) ** -0.5)
        return out.reshape(*out.shape[:2], -1), pages

    itemsize = pages.dtype.itemsize
    height = 32 // itemsize
    gathers = tpu_attend.gathers(tokens, TOP_K, PAGE, context // PAGE, height)
    # At worst each chosen row is the only one of its group.
    keys = min(context, tokens * TOP_K * height) if gathers else context
    page = height if gathers else PAGE
    parts = heads if latent_tpu.expands(tokens, model.nope, model.value, model.rank) else 1
    cut = latent_tpu.plan(tokens, heads // parts, width, itemsize, page, keys // page, True)
    blocks = pl.cdiv(tokens, cut.tokens)
    block = cut.pages * page
    ends = [keys] if gathers else [context - tokens + min(cut.tokens * (n + 1), tokens) for n in range(blocks)]
    steps = batch * parts * blocks
    work = width + model.rank if parts == 1 else model.nope + model.rope + model.value
    return Case(
        "sparse_latent_attention", _named(name, context), "decode" if tokens == 1 else "prefill", call,
        (*queries, *new, *weights, pages, chosen, *_place(batch, context), rows, rows), 6, batch * tokens, steps,
        2 if steps % 2 == 0 else 1,
        total_bytes(*queries, *new, *new, *weights, chosen, _array(batch, tokens, heads * model.value))
        + batch * min(context, tokens * TOP_K) * width * itemsize,
        batch * tokens * TOP_K * heads * work, trips=(batch * parts * sum(pl.cdiv(end, block) for end in ends),),
    )  # fmt: skip


def _seen(tokens: int, context: int) -> int:
    """Keys that the last `tokens` queries of a context see, added up."""
    return sum(context - before for before in range(tokens))


def sparse_cases() -> list[Case]:
    """What the TPU kernels are counted on."""
    decode = [(64, 1, SHORT), (256, 1, SHORT), (1, 1, LONG), (8, 1, LONG)]
    many = [(8, 4, LONG), (1, PREFILL_TOKENS, SHORT), (1, PREFILL_TOKENS, LONG)]
    names = [*SPARSE_MODELS]
    return [
        *(index_case(names[0], *form) for form in decode + many),
        *(sparse_latent_attention_case(name, *form) for name in names[:2] for form in decode + many),
        *(case(names[2], 8, 1, LONG) for case in (index_case, sparse_latent_attention_case)),
    ]
