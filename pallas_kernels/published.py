"""Published models' shapes for each operator with a kernel: what is compiled ahead of time, and counted.

Arguments are laid out as layers have them, the heads of a token side by side, so that what a compiler makes of a case
is what it makes of a model.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.conv_gated_delta import conv_gated_delta
from pallas_kernels.gated_delta import gated_delta, tpu_decode, tpu_grid
from pallas_kernels.gated_delta.tpu_grid import Grid
from pallas_kernels.published_attention import attention_cases
from pallas_kernels.published_case import DECODE_BATCHES, LAYERS, PREFILL_TOKENS, Case, array, total_bytes
from pallas_kernels.published_experts import expert_cases
from pallas_kernels.published_models import DELTA_MODELS
from pallas_kernels.published_records import record_cases
from pallas_kernels.published_sparse import sparse_cases
from pallas_kernels.published_ssd_records import ssd_record_cases
from pallas_kernels.published_state_space import state_space_cases
from pallas_kernels.short_conv import short_conv
from pallas_kernels.short_conv import tpu as short_conv_tpu
from pallas_kernels.tpu_sums import CHUNK


def gated_delta_case(name: str, batch: int, tokens: int, dtype: Any = jnp.bfloat16) -> Case:
    """One call of `gated_delta` with q, k and v of this dtype, and a pool of two layers and two slots to spare."""
    model = DELTA_MODELS[name]
    heads, dim = model.value_heads, model.dim

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    keys, rows = array(batch, tokens, model.key_heads * dim, dtype=dtype), array(batch, dtype=jnp.int32)
    inputs = (
        keys, keys, array(batch, tokens, heads * dim, dtype=dtype),
        array(batch, tokens, heads * (dim if model.per_channel else 1)), array(batch, tokens, heads),
    )  # fmt: skip
    state = array(LAYERS, batch + 2, heads, dim, dim)
    moved = 2 * batch * heads * dim * dim + batch * tokens * heads * dim
    groups = heads // model.key_heads
    if tokens == 1:
        steps, multiply_adds = tpu_decode.steps_of(batch, heads, groups, dim * dim * 4).total, 0
        edges = min(2, steps)  # of two cores
    else:
        blocks = heads // tpu_decode.heads_per_block(heads, groups, dim * dim * 2 * keys.dtype.itemsize)
        edges = batch * blocks
        steps = edges * -(-tokens // tpu_grid.tokens_per_step(tokens))
        # A token, with half a chunk of others before it on average: k and q against keys, the solution and the output
        # from values; and k and q against the state, and k's outer product.
        multiply_adds = batch * tokens * heads * dim * (2 * CHUNK + 3 * dim)
    return Case(
        "gated_delta", name, "decode" if tokens == 1 else "prefill", _flat_gated_delta,
        (*inputs, state, array(dtype=jnp.int32), rows, rows, rows), 5, batch * tokens, steps, edges,
        4 * moved + sum(x.size * x.dtype.itemsize for x in inputs), multiply_adds,
    )  # fmt: skip


def conv_gated_delta_case(name: str, batch: int, tokens: int, dtype: Any = jnp.bfloat16) -> Case:
    """A prefill by `conv_gated_delta` with inputs, filters and convolutions' states of this dtype."""
    model, taps = DELTA_MODELS[name], 4
    heads, dim = model.value_heads, model.dim
    widths = (heads * dim,) * 3 if model.per_channel else ((2 * model.key_heads + heads) * dim,)
    gates = (array(batch, tokens, heads * (dim if model.per_channel else 1)), array(batch, tokens, heads))
    inputs = (
        array(batch, tokens, sum(widths), dtype=dtype), array(sum(widths), taps, dtype=dtype),
        *(array(LAYERS, batch + 2, taps - 1, width, dtype=dtype) for width in widths), *gates,
    )  # fmt: skip
    state, rows = array(LAYERS, batch + 2, heads, dim, dim), array(batch, dtype=jnp.int32)

    def function(x, filters, *rest):
        conv_states, (log_decay, beta, *state_and_slots) = rest[: len(widths)], rest[len(widths) :]
        if model.per_channel:
            x, filters = x.reshape(batch, tokens, 3, -1), filters.reshape(3, -1, taps)
            log_decay = log_decay.reshape(batch, tokens, heads, dim)
        out, conv_states, state = conv_gated_delta(x, filters, conv_states, log_decay, beta, *state_and_slots)
        return out.reshape(batch, tokens, -1), *conv_states, state

    grid = Grid(batch, tokens, model.key_heads, heads, dim, dim, dtype)
    states = 2 * batch * (4 * heads * dim * dim + (taps - 1) * sum(widths) * inputs[0].dtype.itemsize)
    out = array(batch, tokens, heads * dim, dtype=dtype)
    return Case(
        "conv_gated_delta", name, "prefill", function, (*inputs, state, array(dtype=jnp.int32), rows, rows, rows),
        (*range(2, 2 + len(widths)), len(inputs)), batch * tokens, math.prod(grid.steps), batch * grid.blocks,
        states + total_bytes(out, *inputs[:2], *gates), batch * tokens * heads * dim * (2 * CHUNK + 3 * dim),
    )  # fmt: skip


def short_conv_case(name: str, batch: int, tokens: int) -> Case:
    """One call of `short_conv` over the q, k and v of all heads of one of `DELTA_MODELS`, all bfloat16."""
    model = DELTA_MODELS[name]
    channels, taps = (2 * model.key_heads + model.value_heads) * model.dim, 4

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = array(batch, dtype=jnp.int32)
    arguments = (
        array(batch, tokens, channels), array(channels, taps), array(LAYERS, batch + 2, taps - 1, channels),
        array(dtype=jnp.int32), rows, rows, rows,
    )  # fmt: skip
    return Case(
        "short_conv", name, "decode" if tokens == 1 else "prefill", short_conv, arguments, 2, batch * tokens,
        short_conv_tpu.grid_steps(batch, tokens, channels), 0,
        2 * (2 * batch * tokens * channels + 2 * batch * (taps - 1) * channels + taps * channels), 0,
    )  # fmt: skip


def _flat_gated_delta(q, k, v, log_decay, beta, state, *slots):
    dim = state.shape[-1]
    q, k, v = (x.reshape(*x.shape[:2], -1, dim) for x in (q, k, v))
    if log_decay.shape != beta.shape:
        log_decay = log_decay.reshape(v.shape)
    out, state = gated_delta(q, k, v, log_decay, beta, state, *slots)
    return out.reshape(*out.shape[:2], -1), state


def tpu_cases() -> list[Case]:
    """What the TPU kernels are counted on."""
    forms = [(batch, 1) for batch in DECODE_BATCHES] + [(1, PREFILL_TOKENS)]
    # A layer prefills by `conv_gated_delta`.
    cases = [gated_delta_case(name, batch, 1) for name in DELTA_MODELS for batch in DECODE_BATCHES]
    cases += [gated_delta_case(name, 1, PREFILL_TOKENS) for name in ("Kimi Linear 48B", "Qwen3-Next 80B")]
    cases += [conv_gated_delta_case(name, 1, PREFILL_TOKENS) for name in DELTA_MODELS]
    convolutions = [("Kimi Linear 48B", *form) for form in forms] + [("Qwen3-Next 80B", *form) for form in forms]
    return [
        *cases, *record_cases(), *(short_conv_case(*case) for case in convolutions), *state_space_cases(),
        *ssd_record_cases(), *attention_cases(), *sparse_cases(), *expert_cases(),
    ]  # fmt: skip
