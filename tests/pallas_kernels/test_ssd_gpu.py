"""The GPU kernels of `ssd`, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ssd import gpu, reference

HEADS, DIM, GROUPS, STATE, LAYERS, SLOTS = 4, 64, 2, 16, 2, 7
TOKENS = 70
PER_TOKEN = ("x", "dt", "B", "C")

kernel = jax.jit(functools.partial(gpu.ssd, interpret=True))
expected = jax.jit(reference.ssd)


def make_inputs(tokens, rate=1.0, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "x": normal(3, tokens, HEADS, DIM),
        "dt": jax.nn.softplus(2 * normal(3, tokens, HEADS)),
        "A": -rate * jnp.exp(normal(HEADS)),
        "B": normal(3, tokens, GROUPS, STATE),
        "C": normal(3, tokens, GROUPS, STATE),
        "D": normal(HEADS),
    }


def make_state():
    shape = (LAYERS, SLOTS, HEADS, DIM, STATE)
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


def check(inputs, read_slots, write_slots, lengths, atol=2e-6):
    """Agrees on valid outputs and on the whole state array, to which only the rows' slots are written."""
    arguments = (*inputs.values(), make_state(), 1, *map(jnp.array, (read_slots, write_slots, lengths)))
    out, state = kernel(*arguments)
    right, right_state = expected(*arguments)
    valid = np.arange(out.shape[1]) < np.array(lengths)[:, None]
    for got, want in ((np.array(out)[valid], np.array(right)[valid]), (state, right_state)):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, atol=atol * np.abs(want).max(initial=1), rtol=1e-5)
    return out, state


@pytest.mark.parametrize("rate", [1e-4, 1.0, 30.0])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_agrees_with_the_reference(rate, tokens):
    check(make_inputs(tokens, rate), [3, 3, 5], [2, 6, 5], [tokens, min(tokens, 32), min(tokens, 65)])


@pytest.mark.parametrize("log_decay", [0.0, -30.0, -1000.0])
def test_extreme_decay(log_decay):
    inputs = make_inputs(TOKENS)
    inputs |= {"A": jnp.full(HEADS, log_decay), "dt": jnp.ones((3, TOKENS, HEADS))}
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 63, 1])


def test_weak_decay_after_strong_decay_keeps_its_precision():
    """A difference of plain running sums near -300 would have lost three digits."""
    inputs = make_inputs(TOKENS, 0.01)
    inputs["dt"] = inputs["dt"].at[:, 16:26].set(3000.0)
    inputs["x"] = inputs["x"].at[:, 16:26].set(0)
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS] * 3, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_padding_may_hold_nan_and_copies_its_state(tokens):
    inputs, lengths = make_inputs(tokens), [tokens, tokens // 2, 0]
    padding = np.arange(tokens) >= np.array(lengths)[:, None]
    inputs |= {name: inputs[name].at[padding].set(jnp.nan) for name in PER_TOKEN}
    check(inputs, [3, 3, 0], [2, 6, 0], lengths)


def test_chunks_of_bfloat16_are_as_good_as_bfloat16():
    inputs = make_inputs(TOKENS, 0.01)
    inputs |= {name: inputs[name].astype(jnp.bfloat16) for name in ("x", "B", "C")}
    arguments = (*inputs.values(), make_state(), 1, *map(jnp.array, ([3, 1, 5], [2, 6, 4], [TOKENS] * 3)))
    for got, right in zip(kernel(*arguments), expected(*arguments), strict=True):
        error = np.sqrt(np.square(got - right).mean() / np.square(right).mean())
        assert 1e-6 < error < 2**-8


def test_two_runs_are_equal_to_the_bit():
    arguments = (*make_inputs(TOKENS).values(), make_state(), 0)
    slots = tuple(map(jnp.array, ([3, 1, 5], [2, 6, 4], [TOKENS, 40, 2])))
    for a, b in zip(kernel(*arguments, *slots), kernel(*arguments, *slots), strict=True):
        np.testing.assert_array_equal(a, b)


def test_widths_that_are_no_power_of_two_are_refused():
    inputs, state = make_inputs(1), make_state()
    assert gpu.accepts(*inputs.values(), state) is None
    wide = inputs | {"x": inputs["x"][..., :48]}
    assert gpu.accepts(*wide.values(), state) == "head_dim 48 is not 16, 32, 64, 128 or 256"
