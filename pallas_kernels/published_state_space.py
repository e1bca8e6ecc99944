"""Published state space models' shapes: what is compiled ahead of time and counted.

The channels of a token lie side by side, and a decode step has no axis of tokens, as compilers have it in layers.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.conv_ssd import conv_ssd
from pallas_kernels.published_case import DECODE_BATCHES, LAYERS, PREFILL_TOKENS, Case, array, total_bytes
from pallas_kernels.selective_scan import selective_scan
from pallas_kernels.selective_scan import tpu as scan_tpu
from pallas_kernels.ssd import ssd, tpu_decode
from pallas_kernels.ssd.tpu_grid import Grid
from pallas_kernels.tpu_sums import CHUNK


@dataclass(frozen=True)
class SsdModel:
    """Mamba-2: heads, channels of a head, groups of heads, numbers of a channel's state."""

    heads: int
    groups: int
    head_dim: int = 64
    state_size: int = 128


SSD_MODELS = {
    "Nemotron 3 Nano 30B": SsdModel(64, 8),
    "Nemotron 3 Super 120B": SsdModel(128, 8),
    "Nemotron 3 Super 120B, a chip of 8": SsdModel(16, 1),
    "Granite 4.0 H Small": SsdModel(128, 1),
}
# Mamba-1: channels; each has a state of 16 numbers.
SCAN_MODELS = {"Jamba 1.5 Mini": 8192, "Jamba 1.5 Large": 16384}
SCAN_STATE_SIZE = 16


def _lead(batch: int, tokens: int) -> tuple[int, ...]:
    return (batch,) if tokens == 1 else (batch, tokens)


def ssd_case(name: str, batch: int, tokens: int, dtype: Any = jnp.bfloat16) -> Case:
    """One call of `ssd` with x, B and C of this dtype, and a pool of two layers and two slots to spare."""
    model, rows = SSD_MODELS[name], array(batch, dtype=jnp.int32)
    channels, shared, lead = model.heads * model.head_dim, model.groups * model.state_size, _lead(batch, tokens)
    inputs = (
        array(*lead, channels, dtype=dtype), array(*lead, model.heads), array(model.heads),
        array(*lead, shared, dtype=dtype), array(*lead, shared, dtype=dtype), array(model.heads),
    )  # fmt: skip
    state = array(LAYERS, batch + 2, model.heads, model.head_dim, model.state_size)
    shape = (model.heads, model.groups, model.head_dim, model.state_size)
    if tokens == 1:
        steps, edges, multiply_adds = batch * (model.heads // tpu_decode.heads_per_block(*shape)), 0, 0
    else:
        grid = Grid(batch, tokens, *shape, dtype)
        edges, steps = batch * grid.blocks, math.prod(grid.steps)
        multiply_adds = ssd_multiply_adds(model, batch * tokens)

    def run(x, dt, A, B, C, D, state, *slots):
        x, B, C = (
            v.reshape(batch, tokens, n, -1)
            for v, n in ((x, model.heads), (B, model.groups), (C, model.groups))
        )  # fmt: skip
        out, state = ssd(x, dt.reshape(batch, tokens, -1), A, B, C, D, state, *slots)
        return out.reshape(*lead, -1), state

    return Case(
        "ssd", name, "decode" if tokens == 1 else "prefill", run,
        (*inputs, state, array(dtype=jnp.int32), *[rows] * 3), 6, batch * tokens, steps, edges,
        2 * 4 * batch * channels * model.state_size + total_bytes(*inputs) + 4 * batch * tokens * channels,
        multiply_adds,
    )  # fmt: skip


def conv_ssd_case(name: str, batch: int, tokens: int, dtype: Any = jnp.bfloat16) -> Case:
    """A prefill by `conv_ssd` with inputs, filters, biases and convolutions' states of this dtype."""
    model, taps, rows = SSD_MODELS[name], 4, array(batch, dtype=jnp.int32)
    widths = (model.heads * model.head_dim, 2 * model.groups * model.state_size)
    inputs = [array(batch, tokens, width, dtype=dtype) for width in widths]
    filters = [array(width, *of, dtype=dtype) for of in ((taps,), ()) for width in widths]
    conv_states = [array(LAYERS, batch + 2, taps - 1, width, dtype=dtype) for width in widths]
    decays = (array(batch, tokens, model.heads), array(model.heads), array(model.heads))
    state = array(LAYERS, batch + 2, model.heads, model.head_dim, model.state_size)
    grid = Grid(batch, tokens, model.heads, model.groups, model.head_dim, model.state_size, dtype)

    def run(x, bc, x_filter, bc_filter, x_bias, bc_bias, conv_x, conv_bc, *rest):
        pairs = (x, bc), (x_filter, bc_filter), (x_bias, bc_bias), (conv_x, conv_bc)
        out, conv_states, state = conv_ssd(*pairs, *rest)
        return out.reshape(x.shape), *conv_states, state

    states = 2 * batch * (4 * math.prod(state.shape[2:]) + (taps - 1) * sum(widths) * inputs[0].dtype.itemsize)
    return Case(
        "conv_ssd", name, "prefill", run,
        (*inputs, *filters, *conv_states, *decays, state, array(dtype=jnp.int32), *[rows] * 3), (6, 7, 11),
        batch * tokens, math.prod(grid.steps), batch * grid.blocks,
        states + total_bytes(inputs[0], *inputs, *filters, *decays),
        ssd_multiply_adds(model, batch * tokens),
    )  # fmt: skip


def ssd_multiply_adds(model: SsdModel, tokens: int) -> int:
    """Of a prefill's products: a token's with the state, and one into it; with half a chunk of others, of B and C and
    of the values."""
    channels, shared = model.heads * model.head_dim, model.groups * model.state_size
    return tokens * (channels * (2 * model.state_size + CHUNK // 2) + shared * CHUNK // 2)


def selective_scan_case(name: str, batch: int, tokens: int) -> Case:
    """One call of `selective_scan` with x, B and C bfloat16, and a pool of two layers and two slots to spare."""
    channels, numbers, rows = SCAN_MODELS[name], SCAN_STATE_SIZE, array(batch, dtype=jnp.int32)
    lead = _lead(batch, tokens)
    vectors = array(*lead, numbers, dtype=jnp.bfloat16)
    inputs = (
        array(*lead, channels, dtype=jnp.bfloat16), array(*lead, channels),
        array(numbers, channels), vectors, vectors, array(channels),
    )  # fmt: skip
    steps, edges, trips = scan_tpu.grid_steps(batch, tokens, channels, numbers)

    def run(x, dt, A, B, C, D, state, *slots):
        x, dt, B, C = (v.reshape(batch, tokens, -1) for v in (x, dt, B, C))
        out, state = selective_scan(x, dt, A, B, C, D, state, *slots)
        return out.reshape(*lead, -1), state

    return Case(
        "selective_scan", name, "decode" if tokens == 1 else "prefill", run,
        (*inputs, array(LAYERS, batch + 2, numbers, channels), array(dtype=jnp.int32), *[rows] * 3),
        6, batch * tokens, steps, edges,
        2 * 4 * batch * channels * numbers + total_bytes(*inputs) + 4 * batch * tokens * channels, 0, trips,
    )  # fmt: skip


def state_space_cases() -> list[Case]:
    """What the TPU kernels are counted on."""
    forms = [(batch, 1) for batch in DECODE_BATCHES] + [(1, PREFILL_TOKENS)]
    return [
        *(ssd_case(name, batch, 1) for name in SSD_MODELS for batch in DECODE_BATCHES),
        ssd_case("Nemotron 3 Nano 30B", 1, PREFILL_TOKENS),
        *(conv_ssd_case(name, 1, PREFILL_TOKENS) for name in SSD_MODELS),
        *(selective_scan_case(name, *form) for name in SCAN_MODELS for form in forms),
    ]
