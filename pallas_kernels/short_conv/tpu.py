"""Causal depthwise convolution on TPU: one pass over the tokens, and over the rows' own states.

Prefill: the grid is rows x blocks of channels x blocks of tokens, tokens innermost. A window in VMEM (`tpu_window.py`)
holds a block's tokens behind the inputs that came before it; XLA's form would write it to memory. Decode:
`tpu_decode.py`.

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

from pallas_kernels.short_conv import tpu_decode, tpu_window
from pallas_kernels.short_conv.tpu_window import Window

_TOKENS = 256
# Elements of a block of tokens x channels.
_ELEMENTS = 1 << 18


def accepts(x: Array, weight: Array, state: Array, *_: Any, **__: Any) -> str | None:
    """Why the kernel cannot run these arguments of `short_conv`, or None."""
    channels, taps = weight.shape
    if channels % 128:
        return f"{channels} channels are not a multiple of 128"
    return tpu_window.refusal(taps)


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
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T C"], Float[Array, "L N K-1 C"]]:
    """Arguments and result as in `pallas_kernels.short_conv.short_conv`; `interpret` as of `pallas_call`."""
    filters = tpu_window.filters_of(weight, bias, x.dtype)
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    slots = (layers, *(x.astype(jnp.int32) for x in (read_slots, write_slots, lengths)))
    if x.shape[1] > 1 or checkpoint_lengths is not None:
        checkpoints = None if checkpoint_slots is None else (checkpoint_lengths, checkpoint_slots)
        return _prefill(x, filters, state, slots, checkpoints, interpret)
    y, state = tpu_decode.decode(x[:, 0], filters, state, *slots, interpret=interpret)
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
        return tpu_decode.grid_steps(batch)
    size, width = _block(tokens, channels)
    return batch * channels // width * pl.cdiv(tokens, size)


def _cost(x: Array, filters: Array, state: Array) -> pl.CostEstimate:
    past, channels = state.shape[2:]
    return pl.CostEstimate(
        flops=2 * x.size * (past + 1),
        transcendentals=x.size,
        bytes_accessed=2 * (x.size * x.dtype.itemsize + len(x) * past * channels * state.dtype.itemsize)
        + filters.size * 4,
    )


def _prefill(
    x: Float[Array, "B T C"],
    filters: Float[Array, "_ C"],
    state: Array,
    slots: tuple,
    checkpoints: tuple | None,
    interpret,
) -> tuple[Float[Array, "B T C"], Array]:
    batch, tokens, channels = x.shape
    past = state.shape[2]
    size, width = _block(tokens, channels)

    def last_block(lengths, row):
        return jax.lax.div(jnp.maximum(lengths[row] - 1, 0), size)

    block = pl.BlockSpec(
        (None, size, width),
        lambda row, part, block, layer, read, write, lengths, *_: (
            row, jnp.minimum(block, last_block(lengths, row)), part
        ),
    )  # fmt: skip
    filters_block = pl.BlockSpec((len(filters), width), lambda row, part, *_: (0, part))

    def slot(which):
        return pl.BlockSpec(
            (None, None, past, width), lambda row, part, block, layer, *slots: (layer[0], slots[which][row], 0, part)
        )

    kernel, out_slot, kept = functools.partial(_prefill_kernel, last_block), slot(1), []
    if checkpoints is not None:
        # The states of a row go to several slots: by copies rather than as an output's blocks.
        kernel = functools.partial(_checkpointing_kernel, last_block, checkpoints[0].shape[1])
        slots = (*slots, *(x.astype(jnp.int32).ravel() for x in checkpoints))
        out_slot = pl.BlockSpec(memory_space=pl.ANY)
        kept = [pltpu.VMEM((past, width), state.dtype), pltpu.SemaphoreType.DMA]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(slots),
            grid=(batch, channels // width, pl.cdiv(tokens, size)),
            in_specs=[block, filters_block, slot(0)],
            out_specs=[block, out_slot],
            scratch_shapes=[tpu_window.scratch(size, width), *kept],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        input_output_aliases={len(slots) + 2: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(x, filters, state),
        interpret=interpret,
        name="short_conv_prefill",
    )(*slots, x, filters, state)


def _prefill_kernel(last_block, layer, read_slots, write_slots, lengths, x, filters, state, y, new_state, window):
    """Blocks: x, y [T, C]; filters as `tpu_window.filters_of`; states [K-1, C]; window as `tpu_window.scratch`."""

    def keep_last(inputs):
        new_state[...] = inputs.astype(new_state.dtype)

    _run(last_block, lengths, x, filters, state, y, window, keep_last)


def _checkpointing_kernel(
    last_block, checkpoints, layer, read_slots, write_slots, lengths, checkpoint_lengths, checkpoint_slots,
    x, filters, state, y, new_states, window, kept, semaphore,
):  # fmt: skip
    """As `_prefill_kernel`, with all states as `new_states`, to which `kept` [K-1, C] is copied wherever a state is
    wanted."""
    row, part, block = (pl.program_id(axis) for axis in range(3))
    size, width = x.shape

    def keep(inputs, slot):
        kept[...] = inputs.astype(kept.dtype)
        channels = pl.ds(pl.multiple_of(part * width, 128), width)
        copy = pltpu.make_async_copy(kept, new_states.at[layer[0], slot, :, channels], semaphore)
        copy.start()
        copy.wait()

    def keep_checkpoints(inputs_at):
        @pl.loop(row * checkpoints, (row + 1) * checkpoints)
        def _(number):
            tokens = checkpoint_lengths[number] - block * size

            @pl.when((tokens > 0) & (tokens <= size))
            def _():
                keep(inputs_at(tokens), checkpoint_slots[number])

    def keep_last(inputs):
        keep(inputs, write_slots[row])

    _run(last_block, lengths, x, filters, state, y, window, keep_last, keep_checkpoints)


def _run(last_block, lengths, x, filters, state, y, window, keep_last, keep_checkpoints=None):
    """One block. `keep_last` gets the row's last inputs; `keep_checkpoints` gets what gives those at any token."""
    size, inputs = x.shape[0], Window(window, state.shape[0])
    row, block = pl.program_id(0), pl.program_id(2)
    last = last_block(lengths, row)

    @pl.when(block == 0)
    def _():
        inputs.start(state[...])

    @pl.when(block <= last)
    def _():
        for number in range(len(window)):
            own = slice(128 * number, 128 * (number + 1))
            inputs.put(number, x[:, own])
            y[:, own] = inputs.activations(number, filters, y.dtype)
        if keep_checkpoints is not None:
            keep_checkpoints(inputs.last)

        @pl.when(block == last)
        def _():
            keep_last(inputs.last(lengths[row] - block * size))

        @pl.when(block < last)
        def _():
            inputs.advance()
