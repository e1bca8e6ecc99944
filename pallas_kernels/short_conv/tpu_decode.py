"""A token of a causal convolution on TPU, eight rows a step.

A row's state is a few rows of a tile by itself, so a step works on the states of eight rows, turned such that each
past token's inputs are the rows of a register: they go through an array in VMEM with a register's lanes in a row, which
is written and read at strides. States come from their slots, and go to them, by copies that are under way while the
steps before and after are worked on.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.short_conv import tpu_window
from pallas_kernels.short_conv.tpu_window import TILE
from pallas_kernels.tpu_sums import LANES

# Groups of 128 channels whose states are stored together.
_STORED = 4


def grid_steps(batch: int) -> int:
    """Of a call with so many rows."""
    return pl.cdiv(batch, TILE)


def decode(
    x: Float[Array, "B C"],
    filters: Float[Array, "_ C"],
    state: Float[Array, "L N K-1 C"],
    layer: Int[Array, " 1"],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "B C"], Float[Array, "L N K-1 C"]]:
    """Activations and next states of one token; filters as `tpu_window.filters_of` gives them."""
    batch, channels = x.shape
    past, steps, rows = state.shape[2], grid_steps(batch), min(batch, TILE)
    # Rows that fill up the last block have no state.
    fill = TILE * steps - batch
    slots = [jnp.pad(x, (0, fill)) for x in (read_slots, write_slots, lengths)]
    inputs = jnp.pad(x, [(0, fill), (0, 0)])
    cores = 2 if steps % 2 == 0 else 1
    block = pl.BlockSpec((TILE, channels), lambda core, step, *_: (core * (steps // cores) + step, 0))
    y, state = pl.pallas_call(
        functools.partial(_kernel, fill if steps > 1 else 0),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores, steps // cores),
            in_specs=[
                block,
                pl.BlockSpec(filters.shape, lambda *_: (0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[
                *[pltpu.VMEM((2, rows, past, channels), state.dtype)] * 2,
                pltpu.VMEM((channels // LANES, TILE * past, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        # Left to itself XLA moves an array of few slots to VMEM and back, whole, at each layer.
        out_shape=[jax.ShapeDtypeStruct(inputs.shape, x.dtype), pltpu.HBM(state.shape, state.dtype)],
        input_output_aliases={6: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * x.size * (past + 1),
            transcendentals=x.size,
            bytes_accessed=2 * x.size * (x.dtype.itemsize + past * state.dtype.itemsize) + filters.size * 4,
        ),
        interpret=interpret,
        name="short_conv_decode",
    )(layer, *slots, inputs, filters, state)
    return y[:batch], state


def _kernel(
    fill, layer, read_slots, write_slots, lengths, x, filters, given, y, states, arrived, leaving, window, semaphores
):
    """Blocks: x, y [8, C]; filters as `tpu_window.filters_of`; arrived, leaving [2, rows, K-1, C]; window
    [C/128, 8 (K-1), 128], rows of (row, past token). All states are `states`, the same memory as those given. Of the
    last block's rows, `fill` have none."""
    step, steps = pl.program_id(1), pl.num_programs(1)
    first, slot = (pl.program_id(0) * steps + step) * TILE, step % 2

    def each(first, slot, back, act):
        for row in range(arrived.shape[1]):
            state = states.at[layer[0], (write_slots if back else read_slots)[first + row]]
            place = (leaving if back else arrived).at[slot, row]
            pair = (place, state) if back else (state, place)
            copy = pltpu.make_async_copy(*pair, semaphores.at[int(back), slot])
            if row < arrived.shape[1] - fill:
                act(copy)
            else:
                pl.when(first + row < steps * pl.num_programs(0) * TILE - fill)(functools.partial(act, copy))

    def start(first, slot, back):
        each(first, slot, back, lambda copy: copy.start())

    def wait(first, slot, back):
        each(first, slot, back, lambda copy: copy.wait())

    pl.when(step == 0)(lambda: start(first, slot, False))
    pl.when(step + 1 < steps)(lambda: start(first + TILE, 1 - slot, False))
    wait(first, slot, False)
    pl.when(step > 1)(lambda: wait(first - 2 * TILE, slot, True))
    valid = [lengths[first + row] > 0 for row in range(arrived.shape[1])]
    _work(valid, x, filters, arrived.at[slot], y, leaving.at[slot], window)
    start(first, slot, True)

    @pl.when(step + 1 == steps)
    def _():
        pl.when(step > 0)(lambda: wait(first - TILE, 1 - slot, True))
        wait(first, slot, True)


def _work(valid: list[Any], x: Any, filters: Any, states: Any, y: Any, new_states: Any, window: Any) -> None:
    """Of x, y [8, C], and states and new states [rows, K-1, C]. A row that is not valid keeps its state."""
    rows, past, _ = states.shape
    every = [(number, slice(LANES * number, LANES * (number + 1))) for number in range(len(window))]
    row = jax.lax.broadcasted_iota(jnp.int32, (TILE, LANES), 0)
    moves = functools.reduce(jnp.logical_or, [(row == i) & is_valid for i, is_valid in enumerate(valid)])
    of_row: list[Any] = [slice(i * past, (i + 1) * past) for i in range(rows)]
    of_token: list[Any] = [pl.ds(token, TILE, stride=past) for token in range(past)]
    for number, own in every:
        for i, place in enumerate(of_row):
            window[number, place] = states[i, :, own].astype(jnp.float32)
    for number, own in every:
        inputs = [*(window[number, place] for place in of_token), x[:, own].astype(jnp.float32)]
        y[:, own] = tpu_window.silu_of_sum(inputs, filters[:, own], y.dtype)
        for token, place in enumerate(of_token):
            window[number, place] = jnp.where(moves, inputs[token + 1], inputs[token])
    # Tiles of so few rows are stored several at once: together they fill a register.
    for first in range(0, len(window), _STORED):
        last = min(first + _STORED, len(window))
        for i, place in enumerate(of_row):
            wide = jnp.concatenate([window[number, place] for number in range(first, last)], axis=1)
            new_states[i, :, first * LANES : last * LANES] = wide.astype(new_states.dtype)
