"""Mamba-2's TPU kernels, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ssd import reference, tpu, tpu_decode, tpu_grid

BATCH, HEADS, HEAD_DIM, GROUPS, STATE, LAYERS, SLOTS = 3, 8, 64, 2, 128, 2, 7
TOKENS = 130
PER_TOKEN = ("x", "dt", "B", "C")

# Memory that was never written is NaN to the interpreter.
kernel = jax.jit(functools.partial(tpu.ssd, interpret=pltpu.InterpretParams()))
expected = jax.jit(reference.ssd)


def make_inputs(tokens, seed=0, rate=1.0, heads=HEADS, head_dim=HEAD_DIM, groups=GROUPS, state=STATE):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "x": normal(BATCH, tokens, heads, head_dim),
        "dt": jax.nn.softplus(2 * normal(BATCH, tokens, heads)),
        "A": -rate * jnp.exp(normal(heads)),
        "B": normal(BATCH, tokens, groups, state),
        "C": normal(BATCH, tokens, groups, state),
        "D": normal(heads),
    }


def make_state(heads=HEADS, head_dim=HEAD_DIM, state=STATE):
    shape = (LAYERS, SLOTS, heads, head_dim, state)
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


def check(inputs, read_slots, write_slots, lengths, state=None, layer=1, run=kernel, atol=3e-6):
    """Agrees on valid outputs and on the slots written, and leaves the others alone. Returns output and state."""
    state = make_state() if state is None else state
    arguments = (*inputs.values(), state, layer, *map(jnp.array, (read_slots, write_slots, lengths)))
    out, new_state = run(*arguments)
    right, right_state = expected(*arguments)
    valid = np.arange(out.shape[1]) < np.array(lengths)[:, None]
    for got, want in ((np.array(out)[valid], np.array(right)[valid]), (new_state, right_state)):
        np.testing.assert_allclose(got, want, atol=atol * np.abs(want).max(initial=1), rtol=1e-5)
    untouched = np.ones(SLOTS, bool)
    untouched[list(write_slots)] = False
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
    assert np.isfinite(new_state).all()


@pytest.mark.parametrize(
    ("heads", "head_dim", "groups", "state"), [(6, 128, 3, 256), (16, 32, 1, 128), (2, 256, 1, 128), (8, 64, 4, 128)]
)
def test_one_token_of_other_shapes(heads, head_dim, groups, state, monkeypatch):
    """Heads wider and narrower than a tile; blocks of several groups, and of a part of one."""
    monkeypatch.setattr(tpu_decode, "BLOCK_BYTES", 256 * state * 4)
    run = jax.jit(functools.partial(tpu.ssd, interpret=pltpu.InterpretParams()))
    shape = {"heads": heads, "head_dim": head_dim, "state": state}
    check(make_inputs(1, groups=groups, **shape), [3, 1, 5], [2, 6, 4], [1, 1, 1], make_state(**shape), run=run)


@pytest.mark.parametrize("lengths", [(TOKENS, 64, 0), (63, 65, 1), (128, 129, 127)])
@pytest.mark.parametrize("rate", [1e-4, 1.0, 30.0])
def test_chunks(lengths, rate):
    check(make_inputs(TOKENS, rate=rate), [3, 1, 5], [2, 1, 4], lengths)


@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -30.0, -1000.0])
def test_chunks_of_extreme_decay(log_decay):
    inputs = make_inputs(TOKENS)
    inputs["dt"] = jnp.ones_like(inputs["dt"])
    inputs["A"] = jnp.full_like(inputs["A"], log_decay)
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 65, 1])


def test_weak_decay_after_strong_decay_keeps_its_precision():
    """A difference of running sums near -900 would have only four digits left."""
    inputs = make_inputs(TOKENS, rate=0.01)
    inputs["dt"] = inputs["dt"].at[:, :30].set(3000.0)
    inputs["x"] = inputs["x"].at[:, :30].multiply(1e-4)
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS] * 3, atol=1e-6)


def test_steps_of_size_zero_leave_the_state_as_it_is():
    inputs = make_inputs(TOKENS)
    inputs["dt"] = jnp.zeros_like(inputs["dt"])
    _, state = check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS] * 3)
    np.testing.assert_array_equal(state[1, 2], make_state()[1, 3])


def test_padding_in_chunks_may_hold_nan():
    inputs, lengths = make_inputs(TOKENS), [TOKENS, 70, 0]
    padding = np.arange(TOKENS) >= np.array(lengths)[:, None]
    inputs |= {name: inputs[name].at[padding].set(jnp.nan) for name in PER_TOKEN}
    out, state = check(inputs, [3, 3, 4], [2, 6, 5], lengths)
    assert np.isfinite(state).all()
    assert np.isfinite(np.array(out)[~padding]).all()
    np.testing.assert_array_equal(state[1, 5], make_state()[1, 4])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "head_dim", "groups", "state"), [(8, 128, 2, 256), (16, 64, 1, 128), (16, 64, 8, 128)]
)
def test_chunks_of_other_shapes(heads, head_dim, groups, state, monkeypatch):
    """Heads wider than a chunk is long; blocks of a part of a group, and of several."""
    monkeypatch.setattr(tpu_grid, "BLOCK_BYTES", 8 * head_dim * state * 8)
    run = jax.jit(functools.partial(tpu.ssd, interpret=pltpu.InterpretParams()))
    shape = {"heads": heads, "head_dim": head_dim, "state": state}
    inputs = make_inputs(TOKENS, groups=groups, **shape)
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 64, 3], make_state(**shape), run=run)


@pytest.mark.slow
def test_chunks_of_bfloat16_are_as_good_as_bfloat16():
    """Their products round factors to bfloat16 (2^-9); sums and states do not."""
    inputs = make_inputs(TOKENS, rate=0.01)
    inputs |= {name: inputs[name].astype(jnp.bfloat16) for name in ("x", "B", "C")}
    arguments = (*inputs.values(), make_state(), 1, *map(jnp.array, ([3, 1, 5], [2, 6, 4], [TOKENS] * 3)))
    for got, right in zip(kernel(*arguments), expected(*arguments), strict=True):
        error = np.sqrt(np.square(got - right).mean() / np.square(right).mean())
        assert 1e-6 < error < 2**-8


def test_low_precision_inputs_of_one_token_are_computed_in_float32():
    inputs = make_inputs(1)
    inputs |= {name: inputs[name].astype(jnp.bfloat16) for name in ("x", "B", "C")}
    check(inputs, [3, 1, 5], [2, 6, 4], [1, 1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_state_in_bfloat16_is_rounded_once(tokens):
    state = make_state().astype(jnp.bfloat16)
    slots = map(jnp.array, ([3, 1, 5], [2, 6, 4], [tokens] * 3))
    arguments = (*make_inputs(tokens).values(), state, 0, *slots)
    out, new_state = kernel(*arguments)
    right, right_state = expected(*arguments)
    assert new_state.dtype == jnp.bfloat16
    np.testing.assert_allclose(out, right, atol=3e-6 * np.abs(right).max())
    np.testing.assert_allclose(new_state.astype(jnp.float32), right_state.astype(jnp.float32), atol=1e-5, rtol=0.01)


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_two_runs_are_equal_to_the_bit(tokens):
    slots = tuple(map(jnp.array, ([3, 1, 5], [2, 6, 4], [tokens, min(tokens, 65), 1])))
    arguments = (*make_inputs(tokens).values(), make_state(), 0, *slots)
    for a, b in zip(kernel(*arguments), kernel(*arguments), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_two_cores_share_the_rows_without_a_race(capfd):
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True, random_seed=4)
    run = jax.jit(functools.partial(tpu.ssd, interpret=params))
    check(make_inputs(1), [3, 3, 5], [2, 4, 5], [1, 1, 1], run=run)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("heads", "head_dim", "groups", "state", "tokens", "reason"),
    [
        (8, 64, 2, 16, 1, "state_size 16 is not a multiple of 128"),
        (8, 80, 2, 128, 1, "head_dim 80 is not 16, 32, 64 or a multiple of 128"),
        (8, 64, 8, 128, 1, "1 heads of 64 a group are not a multiple of 128"),
        (8, 32, 2, 128, 2, "head_dim 32 is not a multiple of 64, for several tokens"),
        (8, 128, 8, 128, 2, "1 heads a group are not even, for several tokens"),
    ],
)
def test_what_it_does_not_accept(heads, head_dim, groups, state, tokens, reason):
    inputs = make_inputs(tokens, heads=heads, head_dim=head_dim, groups=groups, state=state)
    assert tpu.accepts(*inputs.values()) == reason
