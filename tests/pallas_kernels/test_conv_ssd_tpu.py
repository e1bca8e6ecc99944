"""The TPU kernel, interpreted on the CPU, against the references of the convolutions and Mamba-2's recurrence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_ssd_cases import make_arguments
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.conv_ssd import OPERATOR, tpu
from pallas_kernels.ssd import tpu_grid

TOKENS = 130

# Memory that was never written is NaN to the interpreter.
kernel = jax.jit(functools.partial(tpu.conv_ssd, interpret=pltpu.InterpretParams()))
expected = jax.jit(next(each.function for each in OPERATOR.implementations if each.kind == "reference"))


def check(arguments, reads, writes, lengths, run=kernel, atol=3e-6, **checkpoints):
    """Agrees on valid outputs and on all states, those not written included."""
    slots = (1, *map(jnp.array, (reads, writes, lengths)))
    checkpoints = {name: jnp.array(value) for name, value in checkpoints.items()}
    out, conv, state = run(*arguments, *slots, **checkpoints)
    right, right_conv, right_state = expected(*arguments, *slots, **checkpoints)
    valid = np.arange(out.shape[1]) < np.array(lengths)[:, None]
    assert out.dtype == arguments[0][0].dtype
    for got, wanted in ((np.array(out)[valid], np.array(right)[valid]), (state, right_state)):
        np.testing.assert_allclose(got, wanted, atol=atol * np.abs(wanted).max(initial=1), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, conv, right_conv)
    return out, conv, state


@pytest.mark.parametrize("lengths", [(TOKENS, 64, 0), (63, 65, 1), (128, 129, 3)])
def test_mixed_lengths_slots_out_of_order_and_a_repeated_read_slot(lengths):
    check(make_arguments(TOKENS), [3, 3, 5], [2, 1, 4], lengths)


@pytest.mark.parametrize("rate", [1e-4, 30.0])
def test_vanishing_and_strong_decay(rate):
    check(make_arguments(TOKENS, rate=rate), [3, 1, 5], [2, 1, 4], [TOKENS] * 3)


def test_padding_may_hold_nan():
    (inputs, *weights, dt, A, D, state), lengths = make_arguments(TOKENS), [TOKENS, 70, 0]
    padding = np.arange(TOKENS) >= np.array(lengths)[:, None]
    *inputs, dt = (x.at[padding].set(jnp.nan) for x in (*inputs, dt))
    out, *states = check((tuple(inputs), *weights, dt, A, D, state), [3, 3, 4], [2, 6, 5], lengths)
    assert np.isfinite(np.array(out)[~padding]).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states))


def test_checkpoints():
    """Two in one chunk, at a chunk's edge, at a row's end, none, fewer tokens than taps; NaN in padding."""
    (inputs, *rest), lengths = make_arguments(TOKENS), [TOKENS, 100, 65]
    inputs = tuple(x.at[np.arange(TOKENS) >= np.array(lengths)[:, None]].set(jnp.nan) for x in inputs)
    check(
        (inputs, *rest), [3, 3, 5], [2, 1, 5], lengths,
        checkpoint_lengths=[[1, 63], [64, 0], [65, 0]], checkpoint_slots=[[4, 6], [8, 0], [7, 0]],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "bias"),
    [pytest.param(4, False, marks=pytest.mark.slow), (1, False), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_blocks_of_a_group_and_of_a_part_of_one(groups, bias, monkeypatch):
    """In place: blocks that share a group start from the same inputs, of which one of them writes the last."""
    monkeypatch.setattr(tpu_grid, "BLOCK_BYTES", 2 * 64 * 128 * 8)
    run = jax.jit(functools.partial(tpu.conv_ssd, interpret=pltpu.InterpretParams()))
    arguments = make_arguments(70, heads=8, groups=groups, bias=bias)
    check(arguments, [3, 1, 5], [3, 6, 5], [70, 64, 3], run=run)
    checkpoints = {"checkpoint_lengths": [[66], [1], [0]], "checkpoint_slots": [[7], [8], [0]]}
    check(arguments, [3, 1, 5], [2, 1, 4], [70, 64, 3], run=run, **checkpoints)


@pytest.mark.slow
def test_heads_as_wide_as_a_register_and_two_taps():
    check(make_arguments(66, heads=4, head_dim=128, width=256, taps=2), [3, 1, 5], [2, 1, 4], [66, 1, 64])


@pytest.mark.slow
def test_bfloat16_is_as_good_as_bfloat16():
    """As the recurrence's own kernel on rounded activations; the convolution's states are exact."""
    arguments = make_arguments(TOKENS, dtype=jnp.bfloat16, rate=0.01)
    slots = (1, *map(jnp.array, ([3, 1, 5], [2, 1, 4], [TOKENS] * 3)))
    (out, conv, state), (right, right_conv, right_state) = kernel(*arguments, *slots), expected(*arguments, *slots)
    assert out.dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, conv, right_conv)
    for got, wanted in ((out.astype(jnp.float32), right.astype(jnp.float32)), (state, right_state)):
        error = np.sqrt(np.square(got - wanted).mean() / np.square(wanted).mean())
        assert 1e-6 < error < 2**-7


@pytest.mark.slow
def test_two_cores_share_the_rows_without_a_race_and_two_runs_are_equal_to_the_bit(capfd):
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True, random_seed=4)
    run = jax.jit(functools.partial(tpu.conv_ssd, interpret=params))
    arguments = make_arguments(70)
    found = [check(arguments, [3, 3, 5], [2, 4, 5], [70, 66, 3], run=run) for _ in range(2)]
    assert "RACE" not in capfd.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, *found)
