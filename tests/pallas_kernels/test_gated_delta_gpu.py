"""The GPU kernels, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import KINDS, check, expected, make_inputs, make_state

from pallas_kernels.gated_delta import gpu

TOKENS = 70

kernel = jax.jit(functools.partial(gpu.gated_delta, interpret=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay_scale", [1e-4, 1.0, 30.0])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_agrees_with_the_reference(kind, decay_scale, tokens):
    inputs = make_inputs(kind, tokens, decay_scale=decay_scale)
    check(kernel, inputs, [3, 3, 5], [2, 6, 5], [tokens, tokens // 2 + 1, min(tokens, 17)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_decay", [0.0, -30.0, -1000.0])
def test_extreme_decay(kind, log_decay):
    inputs = make_inputs(kind, TOKENS)
    inputs["log_decay"] = jnp.full_like(inputs["log_decay"], log_decay)
    check(kernel, inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 65, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_weak_decay_after_strong_decay_keeps_its_precision(kind):
    """A difference of plain running sums near -300 would have lost three digits."""
    inputs = make_inputs(kind, TOKENS, decay_scale=0.01)
    inputs["log_decay"] = inputs["log_decay"].at[:, 16:26].set(-30.0)
    check(kernel, inputs, [3, 1, 5], [2, 6, 4], [TOKENS] * 3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_identical_keys_without_decay(kind):
    """The system's inverse is then the hardest."""
    inputs = make_inputs(kind, TOKENS)
    inputs["k"] = jnp.broadcast_to(inputs["k"][:, :1], inputs["k"].shape)
    inputs["log_decay"] = jnp.zeros_like(inputs["log_decay"])
    inputs["beta"] = jnp.ones_like(inputs["beta"])
    check(kernel, inputs, [3, 1, 5], [2, 6, 4], [TOKENS] * 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_padding_may_hold_nan_and_copies_its_state(kind, tokens):
    inputs, lengths = make_inputs(kind, tokens), [tokens, tokens // 2, 0]
    padding = np.arange(tokens) >= np.array(lengths)[:, None]
    inputs = {name: x.at[padding].set(jnp.nan) for name, x in inputs.items()}
    out, state = check(kernel, inputs, [3, 3, 0], [2, 6, 0], lengths)
    assert np.isfinite(state).all()
    assert np.isfinite(np.array(out)[~padding]).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_bfloat16_are_as_good_as_bfloat16(kind):
    inputs = make_inputs(kind, TOKENS, decay_scale=0.01)
    inputs |= {name: inputs[name].astype(jnp.bfloat16) for name in "qkv"}
    arguments = (*inputs.values(), make_state(), 1, *map(jnp.array, ([3, 1, 5], [2, 6, 4], [TOKENS] * 3)))
    for got, right in zip(kernel(*arguments), expected(*arguments), strict=True):
        error = np.sqrt(np.square(got - right).mean() / np.square(right).mean())
        assert 1e-6 < error < 2**-8


def test_two_runs_are_equal_to_the_bit():
    arguments = (*make_inputs("per_channel", TOKENS).values(), make_state(), 0)
    slots = tuple(map(jnp.array, ([3, 1, 5], [2, 6, 4], [TOKENS, 40, 2])))
    for a, b in zip(kernel(*arguments, *slots), kernel(*arguments, *slots), strict=True):
        np.testing.assert_array_equal(a, b)


def test_widths_that_are_no_power_of_two_are_refused():
    inputs = make_inputs("per_head", 1)
    q = inputs["q"][..., :96]
    state = make_state()
    assert gpu.accepts(q, q, *list(inputs.values())[2:], state) == "key_head_dim 96 is not 32, 64, 128 or 256"
    assert gpu.accepts(*inputs.values(), state) is None
