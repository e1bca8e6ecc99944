"""Mamba-1's TPU kernels, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.selective_scan import reference, tpu

BATCH, CHANNELS, STATE, LAYERS, SLOTS = 3, 384, 16, 2, 7
TOKENS = 130
PER_TOKEN = ("x", "dt", "B", "C")

# Memory that was never written is NaN to the interpreter.
kernel = jax.jit(functools.partial(tpu.selective_scan, interpret=pltpu.InterpretParams()))
expected = jax.jit(reference.selective_scan)


def make_inputs(tokens, seed=0, rate=1.0, batch=BATCH):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "x": normal(batch, tokens, CHANNELS),
        "dt": jax.nn.softplus(2 * normal(batch, tokens, CHANNELS)),
        "A": -rate * jnp.exp(normal(STATE, CHANNELS)),
        "B": normal(batch, tokens, STATE),
        "C": normal(batch, tokens, STATE),
        "D": normal(CHANNELS),
    }


def make_state(slots=SLOTS):
    shape = (LAYERS, slots, STATE, CHANNELS)
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


def check(inputs, read_slots, write_slots, lengths, state=None, layer=1, run=kernel, atol=3e-6):
    """Agrees on valid outputs and on the slots written, and leaves the others alone. Returns output and state."""
    state = make_state() if state is None else state
    arguments = (*inputs.values(), state, layer, *map(jnp.array, (read_slots, write_slots, lengths)))
    out, new_state = run(*arguments)
    right, right_state = expected(*arguments)
    valid = np.arange(out.shape[1]) < np.array(lengths)[:, None]
    for got, want in ((np.array(out)[valid], np.array(right)[valid]), (new_state[:, 1:], right_state[:, 1:])):
        np.testing.assert_allclose(got, want, atol=atol * np.abs(want).max(initial=1), rtol=1e-5)
    untouched = np.ones(state.shape[1], bool)
    untouched[[0, *write_slots]] = False
    np.testing.assert_array_equal(new_state[layer][untouched], state[layer][untouched])
    np.testing.assert_array_equal(new_state[1 - layer], state[1 - layer])
    return out, new_state


@pytest.mark.parametrize("rate", [1e-4, 1.0, 30.0, 1000.0])
def test_one_token(rate):
    check(make_inputs(1, rate=rate), [3, 1, 5], [2, 6, 4], [1, 1, 1])


def test_one_token_in_place_and_from_a_shared_slot():
    check(make_inputs(1), [3, 3, 5], [2, 4, 5], [1, 1, 1])


def test_one_token_of_padding_copies_its_state_and_leaks_no_nan():
    inputs, lengths = make_inputs(1), [0, 1, 0]
    inputs |= {name: inputs[name].at[np.array(lengths) == 0].set(jnp.nan) for name in PER_TOKEN}
    state = make_state()
    _, new_state = check(inputs, [0, 1, 5], [0, 6, 4], lengths, state)
    np.testing.assert_array_equal(new_state[1, 4], state[1, 5])
    np.testing.assert_array_equal(new_state[1, 0], state[1, 0])
    assert np.isfinite(new_state).all()


def test_one_token_of_more_rows_than_a_tile_has_and_of_channels_in_blocks(monkeypatch):
    monkeypatch.setattr(tpu, "_BLOCK_BYTES", 128 * STATE * 4)
    run = jax.jit(functools.partial(tpu.selective_scan, interpret=pltpu.InterpretParams()))
    rows = list(range(1, 11))
    check(make_inputs(1, batch=10), rows[::-1], range(11, 21), [1, 0] * 5, make_state(21), run=run)


@pytest.mark.parametrize("lengths", [(TOKENS, 64, 0), (7, 8, 1), (128, 129, 127)])
@pytest.mark.parametrize("rate", [1e-4, 1.0, 30.0])
def test_chunks(lengths, rate):
    check(make_inputs(TOKENS, rate=rate), [3, 1, 5], [2, 1, 4], lengths)


@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -30.0, -1000.0])
def test_chunks_of_extreme_decay(log_decay):
    inputs = make_inputs(TOKENS)
    inputs["dt"] = jnp.ones_like(inputs["dt"])
    inputs["A"] = jnp.full_like(inputs["A"], log_decay)
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 65, 1])


def test_padding_in_chunks_may_hold_nan():
    inputs, lengths = make_inputs(TOKENS), [TOKENS, 70, 0]
    padding = np.arange(TOKENS) >= np.array(lengths)[:, None]
    inputs |= {name: inputs[name].at[padding].set(jnp.nan) for name in PER_TOKEN}
    out, state = check(inputs, [3, 3, 4], [2, 6, 5], lengths)
    assert np.isfinite(state).all()
    assert np.isfinite(np.array(out)[~padding]).all()
    np.testing.assert_array_equal(state[1, 5], make_state()[1, 4])


def test_bfloat16_inputs_round_only_what_is_read_of_the_state():
    """To bfloat16 (2^-9); the state itself is that of float32 arithmetic."""
    inputs = make_inputs(TOKENS)
    inputs |= {name: inputs[name].astype(jnp.bfloat16) for name in ("x", "B", "C")}
    arguments = (*inputs.values(), make_state(), 1, *map(jnp.array, ([3, 1, 5], [2, 6, 4], [TOKENS] * 3)))
    (out, state), (right, right_state) = kernel(*arguments), expected(*arguments)
    error = np.sqrt(np.square(out - right).mean() / np.square(right).mean())
    assert 1e-6 < error < 2**-9
    np.testing.assert_allclose(state, right_state, atol=3e-6 * np.abs(right_state).max(), rtol=1e-5)


def test_two_runs_are_equal_to_the_bit():
    slots = tuple(map(jnp.array, ([3, 1, 5], [2, 6, 4], [TOKENS, 65, 1])))
    arguments = (*make_inputs(TOKENS).values(), make_state(), 0, *slots)
    for a, b in zip(kernel(*arguments), kernel(*arguments), strict=True):
        np.testing.assert_array_equal(a, b)
