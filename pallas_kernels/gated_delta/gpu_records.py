"""The gated delta rule's forms on update records on CUDA GPUs, in Pallas' Triton dialect: programs as in `gpu.py`.

Tokens and records are taken in turn, in float32, a program's part of the state in registers meanwhile: it is read once,
and written at most once. For so few tokens that is less work than it takes to move the states, and the records are as
good as those of decode steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import gpu
from pallas_kernels.gated_delta.gpu import VALUE_BLOCK, decayed, place, step, token_of
from pallas_kernels.triton_records import COMPILER_PARAMS, RingStep, cost, in_turn, integers, load_masked

accepts = gpu.accepts


def accepts_records(k: Array, u: Array, *_: Any) -> str | None:
    """Why the kernel cannot run these arguments of `replay`, or None."""
    return gpu.accepts(k, k, u)


def verify(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array]:
    """As `pallas_kernels.gated_delta.verify.verify`; `interpret` as of `pallas_call`."""
    batch, tokens, heads, dim = v.shape
    arrays = (q, k, v, log_decay, beta)
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (v, k, v, log_decay)]
    out, new_k, u, new_log_decay = pl.pallas_call(
        _verify,
        grid=(dim // VALUE_BLOCK, heads, batch),
        out_shape=results,
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost(state, batch, 1, 7 * tokens, log_decay.size, *arrays, *results),
        interpret=interpret,
        name="gated_delta_verify",
    )(*integers(layer, read_slots, lengths), *arrays, state)
    return out, new_k, u, new_log_decay


def replay(
    k: Float[Array, "B T Hk dk"],
    u: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    accepted: Int[Array, " B"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> Float[Array, "L N Hv dk dv"]:
    """As `pallas_kernels.gated_delta.replay.replay`; `interpret` as of `pallas_call`."""
    batch, tokens, heads, dim = u.shape
    return pl.pallas_call(
        _replay,
        grid=(dim // VALUE_BLOCK, heads, batch),
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        input_output_aliases={7: 0},
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost(state, batch, 2, 3 * tokens, log_decay.size, k, u, log_decay),
        interpret=interpret,
        name="gated_delta_replay",
    )(*integers(layer, read_slots, write_slots, accepted), k, u, log_decay, state)


def buffered(
    q: Float[Array, "B 1 Hk dk"],
    k: Float[Array, "B 1 Hk dk"],
    v: Float[Array, "B 1 Hv dv"],
    log_decay: Float[Array, "B 1 Hv"] | Float[Array, "B 1 Hv dk"],
    beta: Float[Array, "B 1 Hv"],
    state: Float[Array, "L N Hv dk dv"],
    ring_k: Float[Array, "L N W Hk dk"],
    ring_u: Float[Array, "L N W Hv dv"],
    ring_log_decay: Float[Array, "L N W Hv"] | Float[Array, "L N W Hv dk"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    cursors: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array, Array]:
    """As `pallas_kernels.gated_delta.buffered.buffered`; `interpret` as of `pallas_call`.

    The records are folded in registers at every step, and the token run from there: no other way reads fewer bytes.
    """
    batch, _, heads, dim = v.shape
    arrays, pools = (q, k, v, log_decay, beta), (state, ring_k, ring_u, ring_log_decay)
    out_shape = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    rings = [jax.ShapeDtypeStruct((batch, *ring.shape[2:]), ring.dtype) for ring in pools[1:]]
    out, *pools = pl.pallas_call(
        _buffered,
        grid=(dim // VALUE_BLOCK, heads, batch),
        out_shape=[out_shape, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)],
        input_output_aliases={10: 1, 11: 2, 12: 3, 13: 4},
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost(state, batch, 1, 3 * ring_k.shape[2] + 7, rings[2].size, *arrays, out_shape, *rings),
        interpret=interpret,
        name="gated_delta_buffered",
    )(*integers(layer, read_slots, write_slots, cursors, lengths), *arrays, *pools)
    return out, *pools


def _verify(layer, read_slots, lengths, q, k, v, log_decay, beta, state, out, new_k, u, new_log_decay):
    """The arrays are whole, as `verify` takes them."""
    here, tokens = place(k, v, log_decay.ndim == 4), q.shape[1]
    length = lengths[here.row]

    def load(token):
        return token_of(here, token, token < length, q, k, v, log_decay, beta)

    def use(token, inputs, S):
        S, y, key, added = step(S, *inputs)
        there = token < tokens
        for ref, at, x, mask in (
            (out, here.value, y, there), (u, here.value, added, there),
            (new_k, here.key, key, there & here.first_of_key),
            (new_log_decay, here.decay, inputs[3], there & here.first_of_head),
        ):  # fmt: skip
            triton.store(ref.at[here.row, token, *at], x, mask=mask)
        return S

    S = state[layer[0], read_slots[here.row], *here.state].astype(jnp.float32)
    in_turn(tokens, tokens, load, use, S)


def _replay(layer, read_slots, write_slots, accepted, k, u, log_decay, state, new_state):
    """The arrays are whole, as `replay` takes them."""
    here = place(k, u, log_decay.ndim == 4)
    S = state[layer[0], read_slots[here.row], *here.state].astype(jnp.float32)
    S = _fold(S, here, (here.row,), accepted[here.row], k, u, log_decay)
    new_state[layer[0], write_slots[here.row], *here.state] = S.astype(new_state.dtype)


def _buffered(
    layer, read_slots, write_slots, cursors, lengths, q, k, v, log_decay, beta, state, ring_k, ring_u, ring_log_decay,
    out, new_state, new_k, new_u, new_log_decay,
):  # fmt: skip
    """The arrays are whole, as `buffered` takes them."""
    here = place(k, v, log_decay.ndim == 4)
    row, rings = here.row, (ring_k, ring_u, ring_log_decay)
    turn = RingStep(layer[0], read_slots[row], write_slots[row], cursors[row], lengths[row] > 0, ring_k.shape[2])
    token = token_of(here, jnp.int32(0), turn.valid, q, k, v, log_decay, beta)
    before = state[turn.layer, turn.read_slot, *here.state]
    S = _fold(before.astype(jnp.float32), here, (turn.layer, turn.read_slot), turn.cursor, *rings)
    S, y, key, u = step(S, *token)
    out[row, 0, *here.value] = y
    turn.leave_state(new_state, here.state, S, before)
    turn.leave_record(ring_k, new_k, here.key, key, here.first_of_key)
    turn.leave_record(ring_u, new_u, here.value, u)
    turn.leave_record(ring_log_decay, new_log_decay, here.decay, token[3], here.first_of_head)


def _fold(S, here, index, count, k, u, log_decay):
    """S after the first `count` records of arrays whose axis of records comes after `index`."""

    def load(number):
        places = ((k, here.key), (u, here.value), (log_decay, here.decay))
        return [load_masked(x, (*index, number, *at), number < count) for x, at in places]

    def use(_, record, S):
        key, added, decay = record
        return decayed(S, decay) + key[:, None] * added

    return in_turn(count, k.shape[len(index)], load, use, S)
