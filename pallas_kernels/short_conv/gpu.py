"""Causal depthwise convolution on CUDA GPUs, in Pallas' Triton dialect: one pass over the tokens, and over the rows'
own states.

A program has one row and a block of its tokens and channels; a token's taps are loads of the tokens before it, which
the caches hold. The program of a row's first tokens alone reads the state, and writes the new one when it has read
all that it needs of it.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pallas_kernels.triton_checkpoints import segments

_TOKENS = 16
_CHANNELS = 128


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
    batch, tokens, channels = x.shape
    block = min(_TOKENS, pl.next_power_of_2(tokens))
    constants = (weight,) if bias is None else (weight, bias)
    return pl.pallas_call(
        functools.partial(_kernel, block, bias is not None, bool(interpret)),
        grid=(pl.cdiv(channels, _CHANNELS), pl.cdiv(tokens, block), batch),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        input_output_aliases={5 + len(constants): 1},
        compiler_params=triton.CompilerParams(num_warps=8 if tokens > 1 else 2),
        cost_estimate=pl.CostEstimate(
            flops=2 * x.size * weight.shape[1],
            transcendentals=x.size,
            bytes_accessed=2 * (x.size * x.dtype.itemsize + batch * channels * state.shape[2] * state.dtype.itemsize)
            + sum(v.size * v.dtype.itemsize for v in constants),
        ),
        interpret=interpret,
        name=f"short_conv_{'decode' if tokens == 1 else 'prefill'}",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        read_slots.astype(jnp.int32),
        *segments(lengths, write_slots, checkpoint_lengths, checkpoint_slots),
        x,
        *constants,
        state,
    )


def _kernel(block, has_bias, in_order, layer, read_slots, bounds, slots, x, weight, *rest):
    """The arrays are whole, as `short_conv` takes them, and those of `segments`."""
    bias, state, y, new_state = rest if has_bias else (None, *rest)
    row, past = pl.program_id(2), state.shape[2]
    channels = pl.ds(pl.program_id(0) * _CHANNELS, _CHANNELS)
    channel = pl.program_id(0) * _CHANNELS + jnp.arange(_CHANNELS)
    here = channel < x.shape[2]
    first, states = pl.program_id(1) * block, slots.shape[1]
    read, length = read_slots[row], bounds[row, states]
    token = first + jnp.arange(block)

    def before(index, mask):
        """Inputs at index of all, of which `past` are the state's."""
        index, columns = jnp.broadcast_to(index[:, None], mask.shape), jnp.broadcast_to(channel, mask.shape)
        old = triton.load(state.at[layer[0], read, index, columns], mask=mask & (index < past), other=0)
        new = triton.load(x.at[row, index - past, columns], mask=mask & (index >= past), other=0)
        return old.astype(jnp.float32) + new.astype(jnp.float32)

    def constant(array, *index):
        return triton.load(array.at[channels, *index], mask=here, other=0).astype(jnp.float32)

    valid = (token < length)[:, None] & here
    total = jnp.zeros(valid.shape, jnp.float32) if bias is None else constant(bias)
    for tap in range(past + 1):
        total = total + before(token + tap, valid) * constant(weight, jnp.int32(tap))
    triton.store(y.at[row, pl.ds(first, block), channels], (total * jax.nn.sigmoid(total)).astype(y.dtype), mask=valid)

    @pl.when(first == 0)
    def _():
        kept = []
        for number, index in itertools.product(range(states), range(past)):
            place = bounds[row, number + 1] + index
            old = triton.load(state.at[layer[0], read, place, channels], mask=here & (place < past), other=0)
            new = triton.load(x.at[row, place - past, channels], mask=here & (place >= past), other=0)
            kept.append(jnp.where(place < past, old, new.astype(old.dtype)))
        if not in_order:
            # All threads have read the state before any of them writes to what may be the same slot.
            triton.debug_barrier()
        for number, index in itertools.product(range(states), range(past)):
            slot, rows = slots[row, number], kept[number * past + index]
            place = new_state.at[layer[0], jnp.maximum(slot, 0), jnp.int32(index), channels]
            triton.store(place, rows, mask=here & (slot >= 0))
