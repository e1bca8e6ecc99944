"""Published models' shapes for attention over pages: decode at a context of 8,192 tokens, prefill that ends there."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import latent_attention, paged_attention
from pallas_kernels.latent_attention import tpu as latent_tpu
from pallas_kernels.paged_attention import tpu as paged_tpu
from pallas_kernels.paged_softmax_tpu import Plan
from pallas_kernels.published_case import DECODE_BATCHES, PREFILL_TOKENS, Case

CONTEXT, PAGE = 8192, 64


@dataclass(frozen=True)
class PagedModel:
    """Query heads, key heads, head width; `window`: positions that a query sees; whether heads have sinks."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    sinks: bool = False


@dataclass(frozen=True)
class LatentModel:
    """Heads of a chip. The widths are the same in all: 128 and 64 of a key, 128 of a value, 512 of a latent."""

    heads: int
    nope: int = 128
    rope: int = 64
    value: int = 128
    rank: int = 512


PAGED_MODELS = {
    "Qwen3-Next 80B": PagedModel(16, 2, 256),
    "Qwen3.5 27B": PagedModel(24, 4, 256),
    "Qwen3.5 397B": PagedModel(32, 2, 256),
    "Nemotron 3 Nano, Super": PagedModel(32, 2, 128),
    "gpt-oss 120B": PagedModel(64, 8, 64, sinks=True),
    "gpt-oss 120B, window": PagedModel(64, 8, 64, window=128, sinks=True),
}
LATENT_MODELS = {
    "Kimi Linear 48B": LatentModel(32),
    "DeepSeek-V3.2": LatentModel(128),
    "DeepSeek-V3.2, a chip of 8": LatentModel(16),
}


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _bytes(*arrays: jax.ShapeDtypeStruct) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)


def _address(batch: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Layer, page table, starts, lengths."""
    rows = _array(batch, dtype=jnp.int32)
    return _array(dtype=jnp.int32), _array(batch, CONTEXT // PAGE, dtype=jnp.int32), rows, rows


def _seen(tokens: int, window: int | None) -> int:
    """Keys that the last `tokens` queries of a context see, added up."""
    return sum(min(CONTEXT - before, window or CONTEXT) for before in range(tokens))


def _trips(cut: Plan, tokens: int, window: int | None) -> tuple[int, ...]:
    """Blocks of keys that all queries of a step see in whole, and others, over the steps of one row and part."""
    keys = cut.pages * PAGE
    whole = part = 0
    for first in range(CONTEXT - tokens, CONTEXT, cut.tokens):
        end = min(first + cut.tokens, CONTEXT)
        begin = 0 if window is None else max(first - window + 1, 0) // PAGE * PAGE
        for start in range(begin, end, keys):
            seen = start + keys <= first + 1 and (window is None or start > first + cut.tokens - 1 - window)
            whole, part = whole + seen, part + (not seen)
    return (whole + part,) if cut.tokens == 1 else (whole, part)


def _case(operator: str, name: str, function: Any, arguments: tuple, donate: tuple[int, ...], form: dict) -> Case:
    """`form`: batch, tokens, cut, parts of the heads, window, and multiply-adds of a query and key."""
    batch, tokens, cut, parts = form["batch"], form["tokens"], form["cut"], form["parts"]
    steps = batch * parts * pl.cdiv(tokens, cut.tokens)
    trips = tuple(batch * parts * count for count in _trips(cut, tokens, form["window"]))
    return Case(
        operator, name, "decode" if tokens == 1 else "prefill", function, arguments, donate, batch * tokens, steps,
        2 if steps % 2 == 0 else 1, form["bytes"], batch * _seen(tokens, form["window"]) * form["work"], trips,
    )  # fmt: skip


def paged_attention_case(name: str, batch: int, tokens: int, dtype: Any = jnp.bfloat16) -> Case:
    """One call of `paged_attention`, the last `tokens` of a context of `CONTEXT`, in a pool that holds just that."""
    model = PAGED_MODELS[name]
    heads, kv_heads, dim = model.heads, model.kv_heads, model.dim
    array = functools.partial(_array, dtype=dtype)
    q, k = array(batch, tokens, heads * dim), array(batch, tokens, kv_heads * dim)
    pages = array(1, 1 + batch * CONTEXT // PAGE, PAGE, kv_heads * dim)
    sinks = (_array(heads, dtype=jnp.float32),) if model.sinks else ()

    def call(q, k, v, *rest):
        q, k, v = (x.reshape(*x.shape[:2], -1, dim) for x in (q, k, v))
        out, *pages = paged_attention.paged_attention(
            q, k, v, *rest[:6], scale=dim**-0.5, window=model.window, sinks=rest[6] if model.sinks else None
        )
        return out.reshape(*out.shape[:2], -1), *pages

    cut = paged_tpu.plan(tokens, heads, kv_heads, dim, dim, pages.dtype.itemsize, PAGE, CONTEXT // PAGE, model.window)
    keys = batch * min(CONTEXT, (model.window or CONTEXT) + tokens - 1)
    form = {
        "batch": batch, "tokens": tokens, "cut": cut, "window": model.window, "work": 2 * heads * dim,
        "parts": kv_heads // paged_tpu.heads_together(kv_heads, dim, dim) // cut.groups,
        "bytes": 2 * _bytes(q, k, k) + 2 * keys * kv_heads * dim * pages.dtype.itemsize,
    }  # fmt: skip
    return _case("paged_attention", name, call, (q, k, k, pages, pages, *_address(batch), *sinks), (3, 4), form)


def latent_attention_case(name: str, batch: int, tokens: int, dtype: Any = jnp.bfloat16) -> Case:
    """One call of `latent_attention`, the last `tokens` of a context of `CONTEXT`, in a pool that holds just that."""
    model = LATENT_MODELS[name]
    heads, width = model.heads, model.rank + model.rope
    array = functools.partial(_array, dtype=dtype)
    queries = array(batch, tokens, heads * model.nope), array(batch, tokens, heads * model.rope)
    rows = array(batch, tokens, model.rank), array(batch, tokens, model.rope)
    weights = array(heads, model.nope, model.rank), array(heads, model.value, model.rank)
    pages = array(1, 1 + batch * CONTEXT // PAGE, PAGE, width)

    def call(q_nope, q_rope, *rest):
        q_nope, q_rope = (x.reshape(*x.shape[:2], heads, -1) for x in (q_nope, q_rope))
        scale = (model.nope + model.rope) ** -0.5
        out, pages = latent_attention.latent_attention(q_nope, q_rope, *rest, scale=scale)
        return out.reshape(*out.shape[:2], -1), pages

    parts = heads if latent_tpu.expands(tokens, model.nope, model.value, model.rank) else 1
    cut = latent_tpu.plan(tokens, heads // parts, width, pages.dtype.itemsize, PAGE, CONTEXT // PAGE)
    # Of the form that takes fewer: absorbed for one token, keys and values of each head for many.
    work = width + model.rank if tokens == 1 else model.nope + model.rope + model.value
    form = {
        "batch": batch, "tokens": tokens, "cut": cut, "window": None, "parts": parts, "work": heads * work,
        "bytes": _bytes(*queries, *rows, *rows, *weights, array(batch, tokens, heads * model.value))
        + batch * CONTEXT * width * pages.dtype.itemsize,
    }  # fmt: skip
    return _case("latent_attention", name, call, (*queries, *rows, *weights, pages, *_address(batch)), (6,), form)


def attention_cases() -> list[Case]:
    """What the TPU kernels are counted on."""
    forms = [(batch, 1) for batch in DECODE_BATCHES] + [(1, PREFILL_TOKENS)]
    paged = [paged_attention_case(name, *form) for name in PAGED_MODELS for form in forms]
    return paged + [latent_attention_case(name, *form) for name in LATENT_MODELS for form in forms]
