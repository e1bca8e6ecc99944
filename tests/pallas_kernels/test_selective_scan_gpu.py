"""The GPU kernel of `selective_scan`, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.selective_scan import gpu, reference

# More channels than a block, and no whole number of blocks.
CHANNELS, STATE, LAYERS, SLOTS = 100, 8, 2, 7
TOKENS = 65
PER_TOKEN = ("x", "dt", "B", "C")

kernel = jax.jit(functools.partial(gpu.selective_scan, interpret=True))
expected = jax.jit(reference.selective_scan)


def make_inputs(tokens, rate=1.0):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "x": normal(3, tokens, CHANNELS),
        "dt": jax.nn.softplus(2 * normal(3, tokens, CHANNELS)),
        "A": -rate * jnp.exp(normal(STATE, CHANNELS)),
        "B": normal(3, tokens, STATE),
        "C": normal(3, tokens, STATE),
        "D": normal(CHANNELS),
    }


def make_state():
    return jnp.asarray(np.random.default_rng(1).standard_normal((LAYERS, SLOTS, STATE, CHANNELS)), jnp.float32)


def check(inputs, read_slots, write_slots, lengths):
    """Agrees on valid outputs and on the whole state array, to which only the rows' slots are written."""
    arguments = (*inputs.values(), make_state(), 1, *map(jnp.array, (read_slots, write_slots, lengths)))
    out, state = kernel(*arguments)
    right, right_state = expected(*arguments)
    valid = np.arange(out.shape[1]) < np.array(lengths)[:, None]
    for got, want in ((np.array(out)[valid], np.array(right)[valid]), (state, right_state)):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max(initial=1), rtol=1e-5)
    for got, again in zip((out, state), kernel(*arguments), strict=True):
        np.testing.assert_array_equal(got, again)


@pytest.mark.parametrize("rate", [1e-4, 1.0, 30.0])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_agrees_with_the_reference(rate, tokens):
    check(make_inputs(tokens, rate), [3, 3, 5], [2, 6, 5], [tokens, min(tokens, 64), min(tokens, 63)])


@pytest.mark.parametrize("log_decay", [0.0, -30.0, -1000.0])
def test_extreme_decay(log_decay):
    inputs = make_inputs(TOKENS)
    inputs |= {"A": jnp.full_like(inputs["A"], log_decay), "dt": jnp.ones_like(inputs["dt"])}
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 2, 1])


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_padding_may_hold_nan_and_copies_its_state(tokens):
    inputs, lengths = make_inputs(tokens), [tokens, tokens // 2, 0]
    padding = np.arange(tokens) >= np.array(lengths)[:, None]
    inputs |= {name: inputs[name].at[padding].set(jnp.nan) for name in PER_TOKEN}
    check(inputs, [3, 3, 0], [2, 6, 0], lengths)


def test_inputs_of_bfloat16_are_exact():
    inputs = make_inputs(TOKENS)
    inputs |= {name: inputs[name].astype(jnp.bfloat16) for name in ("x", "B", "C")}
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 40, 3])


def test_state_sizes_that_are_no_power_of_two_are_refused():
    inputs = make_inputs(1)
    assert gpu.accepts(*inputs.values(), make_state()) is None
    odd = inputs | {"A": inputs["A"][:6]}
    assert gpu.accepts(*odd.values(), make_state()) == "state_size 6 is not 4, 8, 16, 32 or 64"
