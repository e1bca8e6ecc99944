"""Causal depthwise convolution on CUDA GPUs, in Pallas' Triton dialect: one pass over the tokens, and over the rows'
own states.

A program has one row and a block of its tokens and channels; a token's taps are loads of the tokens before it, which
the caches hold. The program of a row's first tokens alone reads the state, and writes the new one when it has read
all that it needs of it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

_TOKENS = 16
_CHANNELS = 128


def accepts(*_: Any, checkpoint_lengths: Array | None = None, **__: Any) -> str | None:
    """Why the kernel cannot run these arguments of `short_conv`, or None."""
    return None if checkpoint_lengths is None else "it keeps no state but the last"


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
    batch, tokens, channels = x.shape
    block = min(_TOKENS, pl.next_power_of_2(tokens))
    constants = (weight,) if bias is None else (weight, bias)
    return pl.pallas_call(
        functools.partial(_kernel, block, bias is not None, bool(interpret)),
        grid=(pl.cdiv(channels, _CHANNELS), pl.cdiv(tokens, block), batch),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)],
        input_output_aliases={5 + len(constants): 1},
        compiler_params=triton.CompilerParams(num_warps=4 if tokens > 1 else 2),
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
        *(v.astype(jnp.int32) for v in (read_slots, write_slots, lengths)),
        x,
        *constants,
        state,
    )


def _kernel(block, has_bias, in_order, layer, read_slots, write_slots, lengths, x, weight, *rest):
    """The arrays are whole, as `short_conv` takes them."""
    bias, state, y, new_state = rest if has_bias else (None, *rest)
    row, past = pl.program_id(2), state.shape[2]
    channels = pl.ds(pl.program_id(0) * _CHANNELS, _CHANNELS)
    channel = pl.program_id(0) * _CHANNELS + jnp.arange(_CHANNELS)
    here = channel < x.shape[2]
    first, length = pl.program_id(1) * block, lengths[row]
    read, write = read_slots[row], write_slots[row]
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
        for index in range(past):
            place = length + index
            old = triton.load(state.at[layer[0], read, place, channels], mask=here & (place < past), other=0)
            new = triton.load(x.at[row, place - past, channels], mask=here & (place >= past), other=0)
            kept.append(jnp.where(place < past, old, new.astype(old.dtype)))
        if not in_order:
            # All threads have read the state before any of them writes to what may be the same slot.
            triton.debug_barrier()
        for index in range(past):
            triton.store(new_state.at[layer[0], write, jnp.int32(index), channels], kept[index], mask=here)
