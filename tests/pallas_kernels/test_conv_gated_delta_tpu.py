"""The TPU kernel, interpreted on the CPU, against the references of the convolution and the delta rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_delta_cases import KINDS, LAYERS, SLOTS, make_arguments
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.conv_gated_delta import OPERATOR, tpu
from pallas_kernels.gated_delta import tpu_decode

TOKENS = 130

# Memory that was never written is NaN to the interpreter.
kernel = jax.jit(functools.partial(tpu.conv_gated_delta, interpret=pltpu.InterpretParams()))
expected = jax.jit(next(each.function for each in OPERATOR.implementations if each.kind == "reference"))


def check(arguments, reads, writes, lengths, run=kernel, atol=3e-6, **checkpoints):
    """Agrees on valid outputs and on all states, those not written included."""
    slots = (1, *map(jnp.array, (reads, writes, lengths)))
    checkpoints = {name: jnp.array(value) for name, value in checkpoints.items()}
    out, conv, state = run(*arguments, *slots, **checkpoints)
    right, right_conv, right_state = expected(*arguments, *slots, **checkpoints)
    valid = np.arange(out.shape[1]) < np.array(lengths)[:, None]
    assert out.dtype == arguments[0].dtype
    np.testing.assert_allclose(np.array(out)[valid], np.array(right)[valid], atol=atol, rtol=1e-5)
    np.testing.assert_allclose(state, right_state, atol=atol, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, conv, right_conv)
    return out, conv, state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(TOKENS, 64, 0), (63, 65, 1), (128, 129, 3)])
def test_mixed_lengths_slots_out_of_order_and_a_repeated_read_slot(kind, lengths):
    check(make_arguments(kind, TOKENS), [3, 3, 5], [2, 1, 4], lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay_scale", [1e-4, 30.0])
def test_vanishing_and_strong_decay(kind, decay_scale):
    check(make_arguments(kind, TOKENS, decay_scale=decay_scale), [3, 1, 5], [2, 1, 4], [TOKENS] * 3)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_hold_nan(kind):
    arguments, lengths = make_arguments(kind, TOKENS), [TOKENS, 70, 0]
    padding = np.arange(TOKENS) >= np.array(lengths)[:, None]
    inputs, filters, conv, *gates, state = arguments
    inputs, *gates = (x.at[padding].set(jnp.nan) for x in (inputs, *gates))
    out, *states = check((inputs, filters, conv, *gates, state), [3, 3, 4], [2, 6, 5], lengths)
    assert np.isfinite(np.array(out)[~padding]).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states))


@pytest.mark.parametrize("kind", ["per_head", pytest.param("per_channel", marks=pytest.mark.slow)])
def test_checkpoints(kind):
    """Two in one chunk, at a chunk's edge, at a row's end, none, fewer tokens than taps; NaN in padding."""
    arguments, lengths = make_arguments(kind, TOKENS), [TOKENS, 100, 65]
    inputs = arguments[0].at[np.arange(TOKENS) >= np.array(lengths)[:, None]].set(jnp.nan)
    check(
        (inputs, *arguments[1:]), [3, 3, 5], [2, 1, 5], lengths,
        checkpoint_lengths=[[1, 63], [64, 0], [65, 0]], checkpoint_slots=[[4, 6], [8, 0], [7, 0]],
    )  # fmt: skip


@pytest.mark.slow
def test_heads_in_several_blocks_and_pairs(monkeypatch):
    """Each block of heads has its channels of inputs, filters and states."""
    monkeypatch.setattr(tpu_decode, "BLOCK_BYTES", 2 * 128 * 128 * 8)
    run = jax.jit(functools.partial(tpu.conv_gated_delta, interpret=pltpu.InterpretParams()))
    for kind in KINDS:
        check(make_arguments(kind, 70, key_heads=2), [3, 1, 5], [2, 6, 4], [70, 64, 3], run=run)
    checkpoints = {"checkpoint_lengths": [[66], [1], [0]], "checkpoint_slots": [[7], [8], [0]]}
    check(make_arguments("per_head", 70, key_heads=2), [3, 1, 5], [2, 6, 4], [70, 64, 3], run=run, **checkpoints)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_good_as_bfloat16(kind):
    """As the delta rule's own kernel on rounded activations; the convolution's states are exact."""
    arguments = make_arguments(kind, TOKENS, dtype=jnp.bfloat16, decay_scale=0.01)
    slots = (1, *map(jnp.array, ([3, 1, 5], [2, 1, 4], [TOKENS] * 3)))
    (out, conv, state), (right, right_conv, right_state) = kernel(*arguments, *slots), expected(*arguments, *slots)
    assert out.dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, conv, right_conv)
    for got, wanted in ((out.astype(jnp.float32), right.astype(jnp.float32)), (state, right_state)):
        error = np.sqrt(np.square(got - wanted).mean() / np.square(wanted).mean())
        assert 1e-6 < error < 2**-7


@pytest.mark.slow
def test_two_taps_and_states_in_bfloat16():
    arguments = make_arguments("per_head", 70, taps=2)
    inputs, filters, conv, *rest, state = arguments
    arguments = (inputs, filters, tuple(x.astype(jnp.bfloat16) for x in conv), *rest, state)
    check(arguments, [3, 1, 5], [2, 1, 4], [70, 1, 64])


@pytest.mark.slow
def test_two_cores_share_the_rows_without_a_race_and_two_runs_are_equal_to_the_bit(capfd):
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True, random_seed=4)
    run = jax.jit(functools.partial(tpu.conv_gated_delta, interpret=params))
    arguments = make_arguments("per_head", 70)
    found = [check(arguments, [3, 3, 5], [2, 4, 5], [70, 66, 3], run=run) for _ in range(2)]
    assert "RACE" not in capfd.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert found[0][1][0].shape[:2] == (LAYERS, SLOTS)
