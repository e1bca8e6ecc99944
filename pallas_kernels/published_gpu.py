"""Published models' shapes for the operators that have a GPU kernel: what is compiled for Hopper parts, and timed."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.published_case import LAYERS, array, total_bytes
from pallas_kernels.published_gpu_case import SPARE, Arguments, GpuCase, rows_of_slots, state_of
from pallas_kernels.published_gpu_experts import EXPERTS, routed_experts_case

PAGE = 64

_array = functools.partial(array, dtype=jnp.bfloat16)


def _recurrent(
    operator: str, model: str, inputs: Arguments, slot: jax.ShapeDtypeStruct, outs: int, macs: int
) -> GpuCase:
    """A case of an operator with one state, that of a slot, and so many bytes of output."""
    batch, tokens = next(iter(inputs.values())).shape[:2]
    moved = total_bytes(*inputs.values()) + 2 * batch * total_bytes(slot) + outs
    numbers = rows_of_slots(batch, "read_slots", "write_slots", "lengths")
    arguments = {**inputs, "state": state_of(slot, batch), **numbers}
    return GpuCase(operator, model, (batch, tokens), {}, arguments, ("state",), moved, macs)


@dataclass(frozen=True)
class DeltaShape:
    """Key heads, value heads, width of both, and whether decay is per key channel."""

    key_heads: int
    value_heads: int
    dim: int
    per_channel: bool


def gated_delta_case(model: str, shape: DeltaShape, batch: int, tokens: int, dtype: Any = jnp.bfloat16) -> GpuCase:
    """Multiply-adds as of chunks of 64: with half a chunk of others before a token, and with the state."""
    heads, dim, float32 = shape.value_heads, shape.dim, jnp.float32
    keys = _array(batch, tokens, shape.key_heads, dim, dtype=dtype)
    decay = (heads, dim) if shape.per_channel else (heads,)
    inputs = {
        "q": keys, "k": keys, "v": _array(batch, tokens, heads, dim, dtype=dtype),
        "log_decay": _array(batch, tokens, *decay, dtype=float32), "beta": _array(batch, tokens, heads, dtype=float32),
    }  # fmt: skip
    macs = 0 if tokens == 1 else batch * tokens * heads * dim * (2 * 64 + 3 * dim)
    slot = _array(heads, dim, dim, dtype=float32)
    return _recurrent("gated_delta", model, inputs, slot, 4 * batch * tokens * heads * dim, macs)


@dataclass(frozen=True)
class SsdShape:
    """Heads, channels of a head, groups, numbers of a channel's state."""

    heads: int
    dim: int
    groups: int
    state: int


def ssd_case(model: str, shape: SsdShape, batch: int, tokens: int, dtype: Any = jnp.bfloat16) -> GpuCase:
    """Multiply-adds as of chunks of 64: with half a chunk of others before a token, and with the state."""
    heads, dim, float32 = shape.heads, shape.dim, jnp.float32
    shared = _array(batch, tokens, shape.groups, shape.state, dtype=dtype)
    inputs = {
        "x": _array(batch, tokens, heads, dim, dtype=dtype), "dt": _array(batch, tokens, heads, dtype=float32),
        "A": _array(heads, dtype=float32), "B": shared, "C": shared, "D": _array(heads, dtype=float32),
    }  # fmt: skip
    scores = shape.groups * shape.state * 32
    macs = 0 if tokens == 1 else batch * tokens * (scores + heads * dim * (32 + 2 * shape.state))
    slot = _array(heads, dim, shape.state, dtype=float32)
    return _recurrent("ssd", model, inputs, slot, 4 * batch * tokens * heads * dim, macs)


def selective_scan_case(model: str, channels: int, state: int, batch: int, tokens: int) -> GpuCase:
    """All arithmetic is per number of the state: no matrix products."""
    float32, shared = jnp.float32, _array(batch, tokens, state)
    inputs = {
        "x": _array(batch, tokens, channels), "dt": _array(batch, tokens, channels, dtype=float32),
        "A": _array(state, channels, dtype=float32), "B": shared, "C": shared, "D": _array(channels, dtype=float32),
    }  # fmt: skip
    slot = _array(state, channels, dtype=float32)
    return _recurrent("selective_scan", model, inputs, slot, 4 * batch * tokens * channels, 0)


def short_conv_case(model: str, channels: int, batch: int, tokens: int, taps: int = 4) -> GpuCase:
    """All bfloat16, without bias."""
    inputs = {"x": _array(batch, tokens, channels), "weight": _array(channels, taps)}
    slot = _array(taps - 1, channels)
    return _recurrent("short_conv", model, inputs, slot, 2 * batch * tokens * channels, 0)


def _paged(batch: int, context: int) -> tuple[int, Arguments]:
    """Pages for sequences of so many tokens, and where they are."""
    width = -(-context // PAGE)
    rows = _array(batch, dtype=jnp.int32)
    numbers = {
        "layer": _array(dtype=jnp.int32),
        "page_table": _array(batch, width, dtype=jnp.int32),
        "starts": rows,
        "lengths": rows,
    }
    return batch * width + SPARE, numbers


def seen_keys(tokens: int, context: int, window: int | None = None) -> int:
    """Keys that the last `tokens` of `context` positions see, all together."""
    return sum(min(window or context, position + 1) for position in range(context - tokens, context))


@dataclass(frozen=True)
class AttentionShape:
    """Query heads, key heads, head width, window, and whether there are sinks."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    sinks: bool = False


def paged_attention_case(
    model: str, shape: AttentionShape, batch: int, tokens: int, context: int, dtype: Any = jnp.bfloat16
) -> GpuCase:
    """The last `tokens` of sequences of `context`, their own included."""
    pages, numbers = _paged(batch, context)
    row = shape.kv_heads * shape.dim
    q, new = (_array(batch, tokens, heads, shape.dim, dtype=dtype) for heads in (shape.heads, shape.kv_heads))
    pool = _array(LAYERS, pages, PAGE, row, dtype=dtype)
    arguments = {"q": q, "k": new, "v": new, "k_pages": pool, "v_pages": pool, **numbers}

    options: dict[str, Any] = {"scale": shape.dim**-0.5, "window": shape.window}
    if shape.sinks:
        options["sinks"] = np.linspace(-1, 1, shape.heads, dtype=np.float32)
    read = min(context, (shape.window or context) + tokens - 1)
    macs = 2 * batch * shape.heads * shape.dim * seen_keys(tokens, context, shape.window)
    moved = 2 * batch * read * row * q.dtype.itemsize + total_bytes(q, q, new, new, new, new)
    return GpuCase("paged_attention", model, (batch, tokens), options, arguments, ("k_pages", "v_pages"), moved, macs)


@dataclass(frozen=True)
class LatentShape:
    """Heads, widths of a head's key without and with rope, of its value, and of the latents."""

    heads: int
    nope: int = 128
    rope: int = 64
    value: int = 128
    rank: int = 512

    @property
    def scale(self) -> float:
        """Of scores, without YaRN's factor."""
        return (self.nope + self.rope) ** -0.5


def _latent_inputs(shape: LatentShape, batch: int, tokens: int, pages: int, dtype: Any) -> Arguments:
    array = functools.partial(_array, dtype=dtype)
    return {
        "q_nope": array(batch, tokens, shape.heads, shape.nope),
        "q_rope": array(batch, tokens, shape.heads, shape.rope),
        "latent": array(batch, tokens, shape.rank), "k_rope": array(batch, tokens, shape.rope),
        "w_k": array(shape.heads, shape.nope, shape.rank), "w_v": array(shape.heads, shape.value, shape.rank),
        "pages": array(LAYERS, pages, PAGE, shape.rank + shape.rope),
    }  # fmt: skip


def _latent_case(
    operator: str, model: str, shape: LatentShape, inputs: Arguments, rest: Arguments, read: int, seen: int
) -> GpuCase:
    """`read` rows of latents in all; each head sees `seen` keys in all, in the absorbed form."""
    batch, tokens = inputs["latent"].shape[:2]
    row, size = shape.rank + shape.rope, inputs["pages"].dtype.itemsize
    out = batch * tokens * shape.heads * shape.value
    moved = total_bytes(*(x for name, x in inputs.items() if name != "pages")) + (read * row + out) * size
    absorb = batch * tokens * (shape.nope + shape.value) * shape.rank
    macs = shape.heads * (seen * (row + shape.rank) + absorb)
    return GpuCase(
        operator, model, (batch, tokens), {"scale": shape.scale}, {**inputs, **rest}, ("pages",), moved, macs
    )


def latent_attention_case(
    model: str, shape: LatentShape, batch: int, tokens: int, context: int, dtype: Any = jnp.bfloat16
) -> GpuCase:
    """The last `tokens` of sequences of `context`, their own included."""
    pages, numbers = _paged(batch, context)
    inputs = _latent_inputs(shape, batch, tokens, pages, dtype)
    seen = batch * seen_keys(tokens, context)
    return _latent_case("latent_attention", model, shape, inputs, numbers, batch * context, seen)


def sparse_attention_case(
    model: str, shape: LatentShape, batch: int, tokens: int, context: int, chosen: int, dtype: Any = jnp.bfloat16
) -> GpuCase:
    """As `latent_attention_case`, with `chosen` positions for each token."""
    pages, numbers = _paged(batch, context)
    inputs = _latent_inputs(shape, batch, tokens, pages, dtype)
    rest = {"chosen": _array(batch, tokens, chosen, dtype=jnp.int32), **numbers}
    read = batch * min(tokens * chosen, context)
    seen = batch * tokens * chosen
    return _latent_case("sparse_latent_attention", model, shape, inputs, rest, read, seen)


def index_case(
    model: str, heads: int, dim: int, batch: int, tokens: int, context: int, top_k: int, dtype: Any = jnp.bfloat16
) -> GpuCase:
    """The indexer's choice of `top_k` keys, for the last `tokens` of sequences of `context`."""
    pages, numbers = _paged(batch, context)
    inputs = {
        "index_q": _array(batch, tokens, heads, dim, dtype=dtype),
        "index_weights": _array(batch, tokens, heads, dtype=jnp.float32),
        "pages": _array(LAYERS, pages, PAGE, dim, dtype=dtype), "layer": numbers["layer"],
        "page_table": numbers["page_table"], "seen": _array(batch, tokens, dtype=jnp.int32),
    }  # fmt: skip
    size = inputs["pages"].dtype.itemsize
    moved = batch * context * dim * size + total_bytes(inputs["index_q"]) + 4 * batch * tokens * (heads + top_k)
    macs = batch * heads * dim * seen_keys(tokens, context)
    return GpuCase("index_top_k", model, (batch, tokens), {"top_k": top_k}, inputs, ("pages",), moved, macs)


DELTA = {"Kimi Linear 48B": DeltaShape(32, 32, 128, True), "Qwen3-Next 80B": DeltaShape(16, 32, 128, False)}
SSD = {
    "Nemotron 3 Nano": SsdShape(64, 64, 8, 128),
    "Nemotron 3 Super": SsdShape(128, 64, 8, 128),
    "Bamba 9B": SsdShape(128, 64, 1, 128),
}
SCAN = {"Jamba 1.5 Mini": (8192, 16), "Jamba 1.5 Large": (16384, 16)}
CONVOLUTIONS = {"Kimi Linear 48B": 12288, "Qwen3-Next 80B": 8192}
ATTENTION = {
    "Qwen3-Next 80B": AttentionShape(16, 2, 256),
    "Nemotron 3 Super": AttentionShape(32, 2, 128),
    "gpt-oss 120B": AttentionShape(64, 8, 64, sinks=True),
    "gpt-oss 120B, window": AttentionShape(64, 8, 64, 128, sinks=True),
}
LATENT = {"Kimi Linear 48B": LatentShape(32), "DeepSeek-V3.2": LatentShape(128)}
# Heads, width, and how many keys are chosen.
INDEXERS = {"DeepSeek-V3.2": (64, 128, 2048)}


def gpu_cases(batch: int, tokens: int, context: int, long_context: int) -> list[GpuCase]:
    """Every operator and model at one batch and number of new tokens; the indexer over a long context."""
    return [
        *(gated_delta_case(model, shape, batch, tokens) for model, shape in DELTA.items()),
        *(ssd_case(model, shape, batch, tokens) for model, shape in SSD.items()),
        *(selective_scan_case(model, *shape, batch, tokens) for model, shape in SCAN.items()),
        *(short_conv_case(model, channels, batch, tokens) for model, channels in CONVOLUTIONS.items()),
        *(paged_attention_case(model, shape, batch, tokens, context) for model, shape in ATTENTION.items()),
        *(latent_attention_case(model, shape, batch, tokens, context) for model, shape in LATENT.items()),
        *(
            sparse_attention_case(model, LATENT[model], batch, tokens, context, top_k)
            for model, (_, _, top_k) in INDEXERS.items()
        ),
        *(
            index_case(model, heads, dim, batch, tokens, long_context, top_k)
            for model, (heads, dim, top_k) in INDEXERS.items()
        ),
        *(routed_experts_case(model, shape, batch, tokens) for model, shape in EXPERTS.items()),
    ]
