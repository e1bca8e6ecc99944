"""Mamba-2's recurrence on CUDA GPUs, in Pallas' Triton dialect: a program has one row, one head and some of its
channels, whose part of the state stays in registers. States come from the row's read slot and go to its write slot of
the same array.

Prefill takes a chunk of tokens at a time, as `xla.py` does, with decays as `pallas_kernels.triton_maths` has them.
Products of bfloat16 inputs round their factors to bfloat16; sums and states are float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pallas_kernels.triton_checkpoints import run, segments
from pallas_kernels.triton_maths import at_and_before, decay_between, dot, running_sums

# With 64 tokens the compiler spills registers.
CHUNK = 32
# A program's numbers of the state, and its channels, at the most: at batch 1, 64 heads of 64 channels then occupy all
# of a Hopper part.
_STATE_BLOCK = 4096
_CHANNEL_BLOCK = 32


def accepts(x: Array, dt: Array, A: Array, B: Array, *_: Any, **__: Any) -> str | None:
    """Why the kernels cannot run these arguments of `ssd`, or None."""
    for name, width in (("head_dim", x.shape[3]), ("state_size", B.shape[3])):
        if width not in (16, 32, 64, 128, 256):
            return f"{name} {width} is not 16, 32, 64, 128 or 256"
    return None


def ssd(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G N"],
    C: Float[Array, "B T G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H P"], Float[Array, "L S H P N"]]:
    """Arguments and result as in `pallas_kernels.ssd.ssd`; `interpret` as of `pallas_call`."""
    batch, tokens, heads, dim = x.shape
    one = tokens == 1 and checkpoint_lengths is None
    rows = (write_slots, lengths) if one else segments(lengths, write_slots, checkpoint_lengths, checkpoint_slots)
    arrays = (x, dt, A, B, C, D)
    states = batch * heads * dim * B.shape[3]
    # A token's products: C and x's sums over half a chunk on average, and C against the state and x's outer product.
    pairs = batch * tokens * heads * CHUNK // 2 * (B.shape[3] + dim) if tokens > 1 else 0
    return pl.pallas_call(
        _decode if one else _prefill,
        grid=(dim // _channels(dim, B.shape[3]), heads, batch),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={10: 1},
        # A wide state leaves room in the registers of twice as many warps.
        compiler_params=triton.CompilerParams(num_warps=4 if one or B.shape[3] <= 128 else 8, num_stages=2),
        cost_estimate=pl.CostEstimate(
            flops=4 * states * tokens + 2 * pairs,
            transcendentals=dt.size,
            bytes_accessed=2 * states * state.dtype.itemsize
            + sum(v.size * v.dtype.itemsize for v in arrays)
            + x.size * 4,
        ),
        interpret=interpret,
        name=f"ssd_{'decode' if one else 'prefill'}",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(v.astype(jnp.int32) for v in (read_slots, *rows)),
        *arrays,
        state,
    )


def _channels(dim: int, state_size: int) -> int:
    """Of a program."""
    return min(dim, _CHANNEL_BLOCK, _STATE_BLOCK // state_size)


def _place(x, B):
    """Of this program: row, head, the head's group, its channels."""
    part, head, row = (pl.program_id(axis) for axis in range(3))
    width = _channels(x.shape[3], B.shape[3])
    return row, head, head // (x.shape[2] // B.shape[2]), pl.ds(part * width, width)


def _decode(layer, read_slots, write_slots, lengths, x, dt, A, B, C, D, state, out, new_state):
    """The arrays are whole, as `ssd` takes them."""
    row, head, group, channels = _place(x, B)
    valid = lengths[row] > 0
    step, value = dt[row, 0, head].astype(jnp.float32), x[row, 0, head, channels].astype(jnp.float32)
    written, read = (v[row, 0, group, :].astype(jnp.float32) for v in (B, C))
    before = state[layer[0], read_slots[row], head, channels, :]
    decay = jnp.exp(step * A[head].astype(jnp.float32))
    h = decay * before.astype(jnp.float32) + (step * value)[:, None] * written
    out[row, 0, head, channels] = (h * read).sum(axis=1) + D[head].astype(jnp.float32) * value
    new_state[layer[0], write_slots[row], head, channels, :] = jnp.where(valid, h.astype(new_state.dtype), before)


def _prefill(layer, read_slots, bounds, slots, x, dt, A, B, C, D, state, out, new_state):
    """The arrays are whole, as `ssd` takes them, and those of `segments`."""
    row, head, group, channels = _place(x, B)
    exact = x.dtype == jnp.float32
    rate, skip = A[head].astype(jnp.float32), D[head].astype(jnp.float32)

    def chunk(number, valid, h):
        tokens = pl.ds(number * CHUNK, CHUNK)

        def load(array, *index):
            mask = valid[:, None] if len(index) > 1 else valid
            return triton.load(array.at[row, tokens, *index], mask=mask, other=0)

        value, step = load(x, head, channels).astype(jnp.float32), load(dt, head).astype(jnp.float32)
        written, read = load(B, group, slice(None)), load(C, group, slice(None))
        sums, total = running_sums(step * rate)
        decays = decay_between(sums, sums, (slice(None), None), (None, slice(None)))
        scores = jnp.where(at_and_before(CHUNK), decays, 0) * dot(read, written.T, exact)
        before, after = jnp.exp(sums[0] + sums[1]), decay_between(total, sums, (None,), (slice(None),))
        update = step[:, None] * value
        y = dot(scores, update, exact) + before[:, None] * dot(read, h.T, exact) + skip * value
        triton.store(out.at[row, tokens, head, channels], y, mask=valid[:, None])
        return jnp.exp(total[0] + total[1]) * h + dot((after[:, None] * update).T, written, exact)

    first = state[layer[0], read_slots[row], head, channels, :]

    def store(slot, h):
        new_state[layer[0], slot, head, channels, :] = h.astype(new_state.dtype)

    run(bounds, slots, row, CHUNK, chunk, first.astype(jnp.float32), store)
