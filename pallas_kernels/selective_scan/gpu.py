"""The selective scan of Mamba-1 on CUDA GPUs, in Pallas' Triton dialect: a program has one row and some of its
channels, whose state stays in registers from the first token to the last.

Every number of the state has a decay of its own, so nothing becomes a matrix product, and tokens follow one another.
A few tokens' inputs are loaded before the first of them is worked on, so that loads do not add up.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

# Channels of a program: at batch 1, 8,192 channels then occupy all of a Hopper part.
_CHANNELS = 64
# Tokens whose inputs are in flight together.
_TOKENS = 4


def accepts(x: Array, dt: Array, A: Array, *_: Array) -> str | None:
    """Why the kernels cannot run these arguments of `selective_scan`, or None."""
    if A.shape[0] not in (4, 8, 16, 32, 64):
        return f"state_size {A.shape[0]} is not 4, 8, 16, 32 or 64"
    return None


def selective_scan(
    x: Float[Array, "B T E"],
    dt: Float[Array, "B T E"],
    A: Float[Array, "N E"],
    B: Float[Array, "B T N"],
    C: Float[Array, "B T N"],
    D: Float[Array, " E"],
    state: Float[Array, "L S N E"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "B T E"], Float[Array, "L S N E"]]:
    """Arguments and result as in `pallas_kernels.selective_scan.selective_scan`; `interpret` as of `pallas_call`."""
    batch, tokens, channels = x.shape
    arrays = (x, dt, A, B, C, D)
    states = batch * A.size
    return pl.pallas_call(
        _kernel,
        grid=(pl.cdiv(channels, _CHANNELS), batch),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={10: 1},
        compiler_params=triton.CompilerParams(num_warps=2),
        cost_estimate=pl.CostEstimate(
            flops=6 * states * tokens,
            transcendentals=states * tokens,
            bytes_accessed=2 * states * state.dtype.itemsize
            + sum(v.size * v.dtype.itemsize for v in arrays)
            + x.size * 4,
        ),
        interpret=interpret,
        name=f"selective_scan_{'decode' if tokens == 1 else 'prefill'}",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(v.astype(jnp.int32) for v in (read_slots, write_slots, lengths)),
        *arrays,
        state,
    )


def _kernel(layer, read_slots, write_slots, lengths, x, dt, A, B, C, D, state, out, new_state):
    """The arrays are whole, as `selective_scan` takes them."""
    row, channels = pl.program_id(1), pl.ds(pl.program_id(0) * _CHANNELS, _CHANNELS)
    here = pl.program_id(0) * _CHANNELS + jnp.arange(_CHANNELS) < x.shape[2]
    length, together = lengths[row], min(_TOKENS, x.shape[1])

    def constant(array, *index):
        mask = jnp.broadcast_to(here, (*array.shape[-2:-1], _CHANNELS)) if array.ndim > 1 else here
        return triton.load(array.at[*index, channels], mask=mask, other=0).astype(jnp.float32)

    def load(array, token, part=slice(None)):
        mask = here if part is channels else jnp.ones(array.shape[2], bool)
        return triton.load(array.at[row, token, part], mask=mask & (token < length), other=0).astype(jnp.float32)

    rates, skip = constant(A, slice(None)), constant(D)

    def steps(number, h):
        tokens = [number * together + n for n in range(together)]
        # On padding the decay is 1 and the update 0.
        inputs = [
            (load(x, token, channels), load(dt, token, channels), load(B, token), load(C, token)) for token in tokens
        ]
        for token, (value, step, written, read) in zip(tokens, inputs, strict=True):
            h = jnp.exp(step * rates) * h + written[:, None] * (step * value)
            y = (h * read[:, None]).sum(axis=0) + skip * value
            triton.store(out.at[row, token, channels], y, mask=here & (token < length))
        return h

    first = constant(state, layer[0], read_slots[row], slice(None))
    h = jax.lax.fori_loop(0, pl.cdiv(length, together), steps, first)
    mask = jnp.broadcast_to(here, h.shape)
    triton.store(new_state.at[layer[0], write_slots[row], :, channels], h.astype(new_state.dtype), mask=mask)
