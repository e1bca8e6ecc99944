"""Mamba-2's forms on update records on CUDA GPUs, in Pallas' Triton dialect: programs as in `gpu.py`.

Tokens and records are taken in turn, in float32, a program's part of the state in registers meanwhile: it is read once,
and written at most once. For so few tokens that is less work than it takes to move the states.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pallas_kernels.ssd import gpu
from pallas_kernels.ssd.gpu import channels_of_program, output, place, token_of, updated
from pallas_kernels.triton_records import COMPILER_PARAMS, RingStep, cost, in_turn, integers, load_masked

accepts = gpu.accepts


def accepts_records(B: Array, dt_x: Array, log_decay: Array, accepted: Array, state: Array, *_: Any) -> str | None:
    """Why the kernel cannot run these arguments of `replay`, or None."""
    return gpu.accepts_widths(state.shape[3], state.shape[4])


def verify(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G N"],
    C: Float[Array, "B T G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array]:
    """As `pallas_kernels.ssd.verify.verify`; `interpret` as of `pallas_call`."""
    batch, tokens = x.shape[:2]
    arrays = (x, dt, A, B, C, D)
    results = _float32(x.shape, B.shape, (batch, tokens, x[0, 0].size), dt.shape)
    out, new_B, dt_x, log_decay = pl.pallas_call(
        _verify,
        grid=_grid(batch, state),
        out_shape=results,
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost(state, batch, 1, 5 * tokens, dt.size, *arrays, *results),
        interpret=interpret,
        name="ssd_verify",
    )(*integers(layer, read_slots, lengths), *arrays, state)
    return out, new_B, dt_x, log_decay


def replay(
    B: Float[Array, "B T G N"],
    dt_x: Float[Array, "B T H*P"],
    log_decay: Float[Array, "B T H"],
    accepted: Int[Array, " B"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> Float[Array, "L S H P N"]:
    """As `pallas_kernels.ssd.replay.replay`; `interpret` as of `pallas_call`."""
    batch, tokens = B.shape[:2]
    records = (B, dt_x, log_decay)
    return pl.pallas_call(
        _replay,
        grid=_grid(batch, state),
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        input_output_aliases={7: 0},
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost(state, batch, 2, 3 * tokens, log_decay.size, *records),
        interpret=interpret,
        name="ssd_replay",
    )(*integers(layer, read_slots, write_slots, accepted), *records, state)


def buffered(
    x: Float[Array, "B 1 H P"],
    dt: Float[Array, "B 1 H"],
    A: Float[Array, " H"],
    B: Float[Array, "B 1 G N"],
    C: Float[Array, "B 1 G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    ring_B: Float[Array, "L S W G N"],
    ring_dt_x: Float[Array, "L S W H*P"],
    ring_log_decay: Float[Array, "L S W H"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    cursors: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array, Array]:
    """As `pallas_kernels.ssd.buffered.buffered`; `interpret` as of `pallas_call`.

    The records are folded in registers at every step, and the token run from there: no other way reads fewer bytes.
    """
    arrays, pools, batch = (x, dt, A, B, C, D), (state, ring_B, ring_dt_x, ring_log_decay), x.shape[0]
    out_shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    rings = [jax.ShapeDtypeStruct((batch, *ring.shape[2:]), ring.dtype) for ring in pools[1:]]
    out, *pools = pl.pallas_call(
        _buffered,
        grid=_grid(batch, state),
        out_shape=[out_shape, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)],
        input_output_aliases={11: 1, 12: 2, 13: 3, 14: 4},
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost(state, batch, 1, 3 * ring_B.shape[2] + 5, rings[2].size, *arrays, out_shape, *rings),
        interpret=interpret,
        name="ssd_buffered",
    )(*integers(layer, read_slots, write_slots, cursors, lengths), *arrays, *pools)
    return out, *pools


def _grid(batch: int, state: Array) -> tuple[int, int, int]:
    heads, dim, state_size = state.shape[2:]
    return dim // channels_of_program(dim, state_size), heads, batch


def _float32(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _verify(layer, read_slots, lengths, x, dt, A, B, C, D, state, out, new_B, dt_x, log_decay):
    """The arrays are whole, as `verify` takes them."""
    here, tokens = place(state, B), x.shape[1]
    length, rate = lengths[here.row], A[here.head].astype(jnp.float32)

    def load(token):
        return token_of(here, token, token < length, x, dt, B, C)

    def use(token, inputs, h):
        value, step, written, read = inputs
        added, decay, there = step * value, step * rate, token < tokens
        h = updated(h, written, added, decay)
        for ref, at, what, mask in (
            (out, here.value, output(h, read, D[here.head], value), there), (dt_x, here.flat_value, added, there),
            (new_B, here.group, written, there & here.first_of_group),
            (log_decay, here.head, decay, there & here.first_of_head),
        ):  # fmt: skip
            triton.store(ref.at[here.row, token, *at], what, mask=mask)
        return h

    h = state[layer[0], read_slots[here.row], *here.state].astype(jnp.float32)
    in_turn(tokens, tokens, load, use, h)


def _replay(layer, read_slots, write_slots, accepted, B, dt_x, log_decay, state, new_state):
    """The arrays are whole, as `replay` takes them."""
    here = place(state, B)
    h = state[layer[0], read_slots[here.row], *here.state].astype(jnp.float32)
    h = _fold(h, here, (here.row,), accepted[here.row], B, dt_x, log_decay)
    new_state[layer[0], write_slots[here.row], *here.state] = h.astype(new_state.dtype)


def _buffered(
    layer, read_slots, write_slots, cursors, lengths, x, dt, A, B, C, D, state, ring_B, ring_dt_x, ring_log_decay,
    out, new_state, new_B, new_dt_x, new_log_decay,
):  # fmt: skip
    """The arrays are whole, as `buffered` takes them."""
    here = place(state, B)
    row, rings = here.row, (ring_B, ring_dt_x, ring_log_decay)
    turn = RingStep(layer[0], read_slots[row], write_slots[row], cursors[row], lengths[row] > 0, ring_B.shape[2])
    value, step, written, read = token_of(here, jnp.int32(0), turn.valid, x, dt, B, C)
    added, decay = step * value, step * A[here.head].astype(jnp.float32)
    before = state[turn.layer, turn.read_slot, *here.state]
    h = _fold(before.astype(jnp.float32), here, (turn.layer, turn.read_slot), turn.cursor, *rings)
    h = updated(h, written, added, decay)
    out[row, 0, *here.value] = output(h, read, D[here.head], value)
    turn.leave_state(new_state, here.state, h, before)
    turn.leave_record(ring_B, new_B, here.group, written, here.first_of_group)
    turn.leave_record(ring_dt_x, new_dt_x, here.flat_value, added)
    turn.leave_record(ring_log_decay, new_log_decay, here.head, decay, here.first_of_head)


def _fold(h, here, index, count, B, dt_x, log_decay):
    """h after the first `count` records of arrays whose axis of records comes after `index`."""

    def load(number):
        places = ((B, here.group), (dt_x, here.flat_value), (log_decay, here.head))
        return [load_masked(array, (*index, number, *at), number < count) for array, at in places]

    return in_turn(count, B.shape[len(index)], load, lambda _, record, h: updated(h, *record), h)
