"""Mamba-2's recurrence on CUDA GPUs, in Pallas' Triton dialect: a program has one row, one head and some of its
channels, whose part of the state stays in registers. States come from the row's read slot and go to its write slot of
the same array.

Prefill takes a chunk of tokens at a time, as `xla.py` does, with decays as `pallas_kernels.triton_maths` has them.
Products of bfloat16 inputs round their factors to bfloat16; sums and states are float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pallas_kernels.triton_checkpoints import run, segments
from pallas_kernels.triton_maths import at_and_before, decay_between, dot, running_sums
from pallas_kernels.triton_records import load_masked

# With 64 tokens the compiler spills registers.
CHUNK = 32
# A program's numbers of the state, and its channels, at the most: at batch 1, 64 heads of 64 channels then occupy all
# of a Hopper part.
_STATE_BLOCK = 4096
_CHANNEL_BLOCK = 32


def accepts(x: Array, dt: Array, A: Array, B: Array, *_: Any, **__: Any) -> str | None:
    """Why the kernels cannot run these arguments of `ssd`, or None."""
    return accepts_widths(x.shape[3], B.shape[3])


def accepts_widths(head_dim: int, state_size: int) -> str | None:
    """Why the kernels cannot run these, or None."""
    for name, width in (("head_dim", head_dim), ("state_size", state_size)):
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
        grid=(dim // channels_of_program(dim, B.shape[3]), heads, batch),
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


def channels_of_program(dim: int, state_size: int) -> int:
    """Of a head's `dim`, so that a program's part of the state fits its registers."""
    return min(dim, _CHANNEL_BLOCK, _STATE_BLOCK // state_size)


class Place(NamedTuple):
    """What a program has: a row, and indices of its part of a token's x, B and dt, of x with all heads side by side,
    and of a state."""

    row: Any
    value: tuple[Any, ...]
    group: tuple[Any, ...]
    head: tuple[Any, ...]
    flat_value: tuple[Any, ...]
    state: tuple[Any, ...]
    # Whether this is the one program of a head, and of a group.
    first_of_head: Any
    first_of_group: Any


def place(state: Any, B: Any) -> Place:
    """Of this program, given arrays [..., H, P, N] and [..., G, N]."""
    part, head, row = (pl.program_id(axis) for axis in range(3))
    heads, dim, state_size = state.shape[-3:]
    width, share = channels_of_program(dim, state_size), heads // B.shape[-2]
    channels = pl.ds(part * width, width)
    return Place(
        row, (head, channels), (head // share, slice(None)), (head,), (pl.ds(head * dim + part * width, width),),
        (head, channels, slice(None)), part == 0, (part == 0) & (head % share == 0),
    )  # fmt: skip


def token_of(here: Place, token: Any, valid: Any, x: Any, dt: Any, B: Any, C: Any) -> list[Array]:
    """This program's x, dt, B and C of a token, float32. On padding, whatever is there, they are 0: such a token
    neither decays nor updates."""
    places = ((x, here.value), (dt, here.head), (B, here.group), (C, here.group))
    return [load_masked(array, (here.row, token, *at), valid) for array, at in places]


def updated(h: Float[Array, "P N"], B: Float[Array, " N"], dt_x: Float[Array, " P"], log_decay: Any) -> Array:
    """The state after a record."""
    return jnp.exp(log_decay) * h + dt_x[:, None] * B


def output(h: Float[Array, "P N"], C: Float[Array, " N"], skip: Any, x: Float[Array, " P"]) -> Float[Array, " P"]:
    """h C + D x"""
    return (h * C).sum(axis=1) + skip.astype(jnp.float32) * x


def _decode(layer, read_slots, write_slots, lengths, x, dt, A, B, C, D, state, out, new_state):
    """The arrays are whole, as `ssd` takes them."""
    here = place(state, B)
    h = state[layer[0], read_slots[here.row], *here.state].astype(jnp.float32)
    value, step, written, read = token_of(here, jnp.int32(0), lengths[here.row] > 0, x, dt, B, C)
    h = updated(h, written, step * value, step * A[here.head].astype(jnp.float32))
    out[here.row, 0, *here.value] = output(h, read, D[here.head], value)
    new_state[layer[0], write_slots[here.row], *here.state] = h.astype(new_state.dtype)


def _prefill(layer, read_slots, bounds, slots, x, dt, A, B, C, D, state, out, new_state):
    """The arrays are whole, as `ssd` takes them, and those of `segments`."""
    here = place(state, B)
    row, (head, channels), group = here.row, here.value, here.group[0]
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

    first = state[layer[0], read_slots[row], *here.state]

    def store(slot, h):
        new_state[layer[0], slot, *here.state] = h.astype(new_state.dtype)

    run(bounds, slots, row, CHUNK, chunk, first.astype(jnp.float32), store)
