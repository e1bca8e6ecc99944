"""The TPU kernels, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import KEY_DIM, KINDS, TOKENS, VALUE_DIM, VALUE_HEADS, expected, make_inputs, make_state
from delta_rule_cases import check as check_run
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import slot_steps_tpu
from pallas_kernels.gated_delta import tpu, tpu_decode

# Memory that was never written is NaN to the interpreter.
kernel = jax.jit(functools.partial(tpu.gated_delta, interpret=pltpu.InterpretParams()))


def check(*arguments, run=kernel, **options):
    return check_run(run, *arguments, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay_scale", [1e-4, 1.0, 30.0])
def test_one_token(kind, decay_scale):
    check(make_inputs(kind, 1, decay_scale=decay_scale), [3, 1, 5], [2, 6, 4], [1, 1, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_in_place_and_from_a_shared_slot(kind):
    check(make_inputs(kind, 1), [3, 3, 5], [2, 4, 5], [1, 1, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_of_padding_copies_its_state_and_leaks_no_nan(kind):
    inputs, lengths = make_inputs(kind, 1), [0, 1, 0]
    inputs = {name: x.at[np.array(lengths) == 0].set(jnp.nan) for name, x in inputs.items()}
    state = make_state()
    _, new_state = check(inputs, [0, 1, 5], [0, 6, 4], lengths, state)
    np.testing.assert_array_equal(new_state[1, 4], state[1, 5])
    assert np.isfinite(new_state).all()


@pytest.mark.parametrize("tokens", [1, pytest.param(TOKENS, marks=pytest.mark.slow)])
def test_heads_in_several_blocks(tokens, monkeypatch):
    monkeypatch.setattr(tpu_decode, "BLOCK_BYTES", KEY_DIM * VALUE_DIM * 4)
    monkeypatch.setattr(slot_steps_tpu, "STEP_BYTES", KEY_DIM * VALUE_DIM * 4)
    run = jax.jit(functools.partial(tpu.gated_delta, interpret=pltpu.InterpretParams()))
    check(make_inputs("per_head", tokens, key_heads=VALUE_HEADS), [3, 1, 5], [2, 6, 4], [tokens] * 3, run=run)


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_inputs_of_one_token_are_computed_in_float32(kind):
    inputs = {name: x.astype(jnp.bfloat16) for name, x in make_inputs(kind, 1).items()}
    check(inputs, [3, 1, 5], [2, 6, 4], [1, 1, 1])


@pytest.mark.slow
def test_state_in_bfloat16_is_rounded_once():
    state = make_state().astype(jnp.bfloat16)
    arguments = (*make_inputs("per_channel", 1).values(), state, 0, *map(jnp.array, ([3, 1, 5], [2, 6, 4], [1, 1, 1])))
    out, new_state = kernel(*arguments)
    right, right_state = expected(*arguments)
    assert new_state.dtype == jnp.bfloat16
    np.testing.assert_allclose(out, right, atol=3e-6)
    np.testing.assert_allclose(new_state.astype(jnp.float32), right_state.astype(jnp.float32), atol=1e-5, rtol=0.01)


@pytest.mark.slow
def test_two_cores_share_the_rows_without_a_race(capfd, monkeypatch):
    monkeypatch.setattr(slot_steps_tpu, "STEP_BYTES", 1)  # a row a step
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True, random_seed=4)
    run = jax.jit(functools.partial(tpu.gated_delta, interpret=params))
    check(make_inputs("per_channel", 1), [3, 3, 5], [2, 4, 5], [1, 1, 1], run=run)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.slow
def test_the_race_detector_sees_a_row_that_writes_what_another_reads(capfd, monkeypatch):
    """The call that the precondition rules out; shows that the test above can fail."""
    monkeypatch.setattr(slot_steps_tpu, "STEP_BYTES", 1)  # a row a step
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True, random_seed=4)
    run = jax.jit(functools.partial(tpu.gated_delta, interpret=params))
    slots = map(jnp.array, ([3, 1, 5], [5, 3, 1], [1, 1, 1]))
    raised = ""
    try:
        jax.block_until_ready(run(*make_inputs("per_channel", 1).values(), make_state(), 0, *slots))
    except RuntimeError as error:  # jax 0.12; 0.10 only prints
        raised = str(error)
    assert "RACE" in raised + capfd.readouterr().out


def test_two_runs_are_equal_to_the_bit():
    arguments = (*make_inputs("per_channel", 1).values(), make_state(), 0)
    slots = tuple(map(jnp.array, ([3, 1, 5], [2, 6, 4], [1, 1, 1])))
    first, second = kernel(*arguments, *slots), kernel(*arguments, *slots)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(TOKENS, 64, 0), (63, 65, 1), (128, 129, 127)])
@pytest.mark.parametrize("decay_scale", [1e-4, 1.0, 30.0])
def test_chunks(kind, lengths, decay_scale):
    check(make_inputs(kind, TOKENS, decay_scale=decay_scale), [3, 1, 5], [2, 1, 4], lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "key_heads", "value_heads"), [("per_head", 2, 4), ("per_head", 3, 3), ("per_channel", 3, 3)]
)
def test_chunks_of_several_pairs_of_heads(kind, key_heads, value_heads):
    """Heads are worked on two at a time, of one key head or of two; an odd one is alone."""
    inputs = make_inputs(kind, TOKENS, key_heads=key_heads, value_heads=value_heads)
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 64, 3], make_state(value_heads=value_heads))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_decay", [0.0, -30.0, -1000.0])
def test_chunks_of_extreme_decay(kind, log_decay):
    inputs = make_inputs(kind, TOKENS)
    inputs["log_decay"] = jnp.full_like(inputs["log_decay"], log_decay)
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 65, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_weak_decay_after_strong_decay_keeps_its_precision(kind):
    """A difference of running sums near -900 would have only four digits left."""
    inputs = make_inputs(kind, TOKENS, decay_scale=0.01)
    inputs["log_decay"] = inputs["log_decay"].at[:, :30].set(-30.0)
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS] * 3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_identical_keys_without_decay(kind):
    """The system's inverse is then the hardest."""
    inputs = make_inputs(kind, TOKENS)
    inputs["k"] = jnp.broadcast_to(inputs["k"][:, :1], inputs["k"].shape)
    inputs["log_decay"] = jnp.zeros_like(inputs["log_decay"])
    inputs["beta"] = jnp.ones_like(inputs["beta"])
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS] * 3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_in_chunks_may_hold_nan(kind):
    inputs, lengths = make_inputs(kind, TOKENS), [TOKENS, 70, 0]
    padding = np.arange(TOKENS) >= np.array(lengths)[:, None]
    inputs = {name: x.at[padding].set(jnp.nan) for name, x in inputs.items()}
    out, state = check(inputs, [3, 3, 4], [2, 6, 5], lengths)
    assert np.isfinite(state).all()
    assert np.isfinite(np.array(out)[~padding]).all()
    np.testing.assert_array_equal(state[1, 5], make_state()[1, 4])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_bfloat16_are_as_good_as_bfloat16(kind):
    """Their products round factors to bfloat16 (2^-9), as flash-linear-attention's do; sums and states do not."""
    inputs = make_inputs(kind, TOKENS, decay_scale=0.01)
    inputs |= {name: inputs[name].astype(jnp.bfloat16) for name in "qkv"}
    arguments = (*inputs.values(), make_state(), 1, *map(jnp.array, ([3, 1, 5], [2, 6, 4], [TOKENS] * 3)))
    for got, right in zip(kernel(*arguments), expected(*arguments), strict=True):
        error = np.sqrt(np.square(got - right).mean() / np.square(right).mean())
        assert 1e-6 < error < 2**-8
