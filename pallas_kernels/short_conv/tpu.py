"""Causal depthwise convolution on TPU: one pass over the tokens, and over the rows' own states.

Prefill: the grid is rows x blocks of channels x blocks of tokens, tokens innermost. A window in VMEM holds a block's
tokens behind the inputs that came before it; taps are loads at different offsets. XLA's form would write the window to
memory. Decode: a row a step, the inputs and outputs of eight rows a block.

States are read and written where they lie, slot after slot. XLA prefers to lay an array [L, N, K-1, C] out with slots
along sublanes, and copies all of it at the edge of a program unless the program's arguments are laid out row-major.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

# Rows of a sublane tile: tokens begin there in the window, so that they are stored as whole tiles.
_TILE = 8
_TOKENS = 256
# Elements of a block of tokens x channels.
_ELEMENTS = 1 << 18


def accepts(x: Array, weight: Array, state: Array, *_: Any) -> str | None:
    """Why the kernel cannot run these arguments of `short_conv`, or None."""
    channels, taps = weight.shape
    if channels % 128:
        return f"{channels} channels are not a multiple of 128"
    if not 2 <= taps <= _TILE + 1:
        return f"{taps} taps are not 2 to {_TILE + 1}"
    return None


def short_conv(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C K"],
    state: Float[Array, "L N K-1 C"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    bias: Float[Array, " C"] | None = None,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "B T C"], Float[Array, "L N K-1 C"]]:
    """Arguments and result as in `pallas_kernels.short_conv.short_conv`; `interpret` as of `pallas_call`."""
    taps = weight.T.astype(jnp.float32)
    offset = jnp.zeros((1, x.shape[2]), jnp.float32) if bias is None else bias.astype(jnp.float32)[None]
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    slots = (layers, *(x.astype(jnp.int32) for x in (read_slots, write_slots, lengths)))
    if x.shape[1] > 1:
        return _prefill(x, taps, offset, state, slots, interpret)
    y, state = _decode(x[:, 0], taps, offset, state, slots, interpret)
    return y[:, None], state


def _block(tokens: int, channels: int) -> tuple[int, int]:
    """Tokens and channels of a block of a prefill."""
    size = min(tokens, _TOKENS)
    tiles = channels // 128
    fitting = [n for n in range(2, tiles + 1) if tiles % n == 0 and 128 * n * size <= _ELEMENTS]
    return size, 128 * max(fitting, default=1)


def grid_steps(batch: int, tokens: int, channels: int) -> int:
    """Of the kernel for such a call."""
    if tokens == 1:
        return pl.cdiv(batch, _TILE) * _TILE
    size, width = _block(tokens, channels)
    return batch * channels // width * pl.cdiv(tokens, size)


def _cost(x: Array, taps: Array, state: Array) -> pl.CostEstimate:
    past, channels = state.shape[2:]
    return pl.CostEstimate(
        flops=2 * x.size * len(taps),
        transcendentals=x.size,
        bytes_accessed=2 * (x.size * x.dtype.itemsize + len(x) * past * channels * state.dtype.itemsize)
        + (taps.size + channels) * 4,
    )


def _decode(
    x: Float[Array, "B C"],
    taps: Float[Array, "K C"],
    offset: Float[Array, "1 C"],
    state: Array,
    slots: tuple,
    interpret,
) -> tuple[Float[Array, "B C"], Array]:
    batch, channels = x.shape
    padding = -batch % _TILE
    # Rows that fill up the last block are padding: they read and write the null slot.
    layer, *rows = (slots[0], *(jnp.pad(column, (0, padding)) for column in slots[1:]))
    inputs = jnp.pad(x, [(0, padding), (0, 0)])
    block = pl.BlockSpec((_TILE, channels), lambda block, *_: (block, 0))
    constants = [pl.BlockSpec(c.shape, lambda *_: (0, 0)) for c in (taps, offset)]

    def slot(which):
        return pl.BlockSpec(
            (None, None, *state.shape[2:]),
            lambda block, row, layer, *slots: (layer[0], slots[which][block * _TILE + row], 0, 0),
        )

    y, state = pl.pallas_call(
        _decode_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(len(inputs) // _TILE, _TILE),
            in_specs=[block, *constants, slot(0)],
            out_specs=[block, slot(1)],
            scratch_shapes=[pltpu.VMEM((_TILE, channels), jnp.float32)] * 2,
        ),
        out_shape=[jax.ShapeDtypeStruct(inputs.shape, x.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        input_output_aliases={7: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(x, taps, state),
        interpret=interpret,
        name="short_conv_decode",
    )(layer, *rows, inputs, taps, offset, state)
    return y[:batch], state


def _decode_kernel(layer, read_slots, write_slots, lengths, x, taps, offset, state, y, new_state, rows_in, rows_out):
    """Blocks: x, y, rows_in, rows_out [8, C]; taps [K, C]; offset [1, C]; states [K-1, C]."""
    row, past = pl.program_id(1), state.shape[0]

    @pl.when(row == 0)
    def _():
        rows_in[...] = x[...].astype(jnp.float32)

    # A row of padding may hold NaN; its output goes nowhere.
    before, now = state[...].astype(jnp.float32), rows_in[pl.ds(row, 1)]
    total = offset[...] + now * taps[past:] + sum(before[n : n + 1] * taps[n : n + 1] for n in range(past))
    rows_out[pl.ds(row, 1)] = total * jax.nn.sigmoid(total)
    valid = lengths[pl.program_id(0) * _TILE + row] > 0
    new_state[...] = jnp.where(valid, jnp.concatenate([before[1:], now]), before).astype(new_state.dtype)

    @pl.when(row == _TILE - 1)
    def _():
        y[...] = rows_out[...].astype(y.dtype)


def _prefill(
    x: Float[Array, "B T C"],
    taps: Float[Array, "K C"],
    offset: Float[Array, "1 C"],
    state: Array,
    slots: tuple,
    interpret,
) -> tuple[Float[Array, "B T C"], Array]:
    batch, tokens, channels = x.shape
    past = len(taps) - 1
    size, width = _block(tokens, channels)

    def last_block(lengths, row):
        return jax.lax.div(jnp.maximum(lengths[row] - 1, 0), size)

    block = pl.BlockSpec(
        (None, size, width),
        lambda row, part, block, layer, read, write, lengths: (
            row, jnp.minimum(block, last_block(lengths, row)), part
        ),
    )  # fmt: skip
    constants = [pl.BlockSpec((n, width), lambda row, part, *_: (0, part)) for n in (past + 1, 1)]

    def slot(which):
        return pl.BlockSpec(
            (None, None, past, width), lambda row, part, block, layer, *slots: (layer[0], slots[which][row], 0, part)
        )

    return pl.pallas_call(
        functools.partial(_prefill_kernel, last_block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, channels // width, pl.cdiv(tokens, size)),
            in_specs=[block, *constants, slot(0)],
            out_specs=[block, slot(1)],
            scratch_shapes=[pltpu.VMEM((_TILE + size, width), jnp.float32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        input_output_aliases={7: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(x, taps, state),
        interpret=interpret,
        name="short_conv_prefill",
    )(*slots, x, taps, offset, state)


def _prefill_kernel(last_block, layer, read_slots, write_slots, lengths, x, taps, offset, state, y, new_state, window):
    """Blocks: x, y [T, C]; taps [K, C]; offset [1, C]; states [K-1, C]; window [8 + T, C]: the past before row 8."""
    size, past = x.shape[0], state.shape[0]
    row, block = pl.program_id(0), pl.program_id(2)
    last = last_block(lengths, row)
    first = _TILE - past

    @pl.when(block == 0)
    def _():
        window[first:_TILE] = state[...].astype(jnp.float32)

    @pl.when(block <= last)
    def _():
        left = lengths[row] - block * size
        token = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        window[_TILE:] = jnp.where(token < left, x[...].astype(jnp.float32), 0)
        total = offset[...] + sum(
            window[first + tap : first + tap + size] * taps[tap : tap + 1] for tap in range(past + 1)
        )
        y[...] = (total * jax.nn.sigmoid(total)).astype(y.dtype)

        @pl.when(block == last)
        def _():
            # After n valid tokens the last inputs start n rows later: nothing moves when n is 0.
            kept = [window[pl.ds(first + left + n, 1)] for n in range(past)]
            new_state[...] = jnp.concatenate(kept).astype(new_state.dtype)

        @pl.when(block < last)
        def _():
            window[first:_TILE] = window[first + size : _TILE + size]
