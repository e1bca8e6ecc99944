"""How steps share out rows, and a decode step whose rows do so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import KEY_DIM, VALUE_DIM, check, make_inputs
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import slot_steps_tpu
from pallas_kernels.gated_delta import tpu

HEAD_BYTES = KEY_DIM * VALUE_DIM * 4


@pytest.mark.parametrize(
    ("batch", "heads", "cores", "size", "rows", "padding", "each"),
    [
        (64, 4, 1, 4, 8, 0, 8),  # small states: several rows a step
        (64, 4, 2, 4, 8, 0, 4),
        (65, 4, 2, 4, 8, 15, 5),  # cores have as many steps each
        (9, 4, 1, 4, 3, 0, 3),  # few rows: smaller steps, evenly
        (1, 4, 2, 4, 1, 0, 1),
        (1, 32, 1, 16, 1, 0, 2),
        (3, 32, 2, 16, 1, 0, 3),  # a row of one core and a half
        (64, 64, 1, 32, 1, 0, 128),
    ],
)
def test_steps(batch, heads, cores, size, rows, padding, each):
    sizes = [n for n in range(1, heads + 1) if heads % n == 0]
    steps = slot_steps_tpu.plan(batch, heads, sizes, 1 << 16, cores)
    assert (steps.size, steps.rows, steps.padding, steps.each) == (size, rows, padding, each)


def test_splitting_and_joining_are_inverse():
    steps = slot_steps_tpu.plan(5, 6, [3], 1 << 20, 2)
    x = jnp.arange(5 * 6 * 7).reshape(5, 6, 7)
    parts = steps.split(x)
    assert parts.shape == (steps.total, 3, 7)
    np.testing.assert_array_equal(parts[3], x[1, 3:])
    np.testing.assert_array_equal(steps.join(parts), x)


def several_rows(monkeypatch, rows, **params):
    """A decode step with so many rows of two heads a step."""
    monkeypatch.setattr(slot_steps_tpu, "STEP_BYTES", rows * 2 * HEAD_BYTES)
    return jax.jit(functools.partial(tpu.gated_delta, interpret=pltpu.InterpretParams(**params)))


@pytest.mark.parametrize("kind", ["per_head", "per_channel"])
def test_rows_of_a_step_may_share_a_slot_and_the_last_step_is_filled_up(kind, monkeypatch):
    """Three rows two a step, for two cores: padding of one row, which takes the null slot, as a padded row does."""
    inputs, lengths = make_inputs(kind, 1), [1, 1, 0]
    inputs = {name: x.at[2].set(jnp.nan) for name, x in inputs.items()}
    check(several_rows(monkeypatch, 2), inputs, [3, 3, 0], [2, 4, 0], lengths)


@pytest.mark.slow
def test_more_steps_than_buffers_without_a_race(monkeypatch, capfd):
    """Six rows, one a step of two cores; in place, forked, and from elsewhere."""
    run = several_rows(monkeypatch, 1, num_cores_or_threads=2, detect_races=True, random_seed=4)
    check(run, make_inputs("per_head", 1, batch=6), [1, 1, 3, 4, 5, 5], [2, 6, 3, 4, 5, 0], [1] * 5 + [0])
    assert "RACE" not in capfd.readouterr().out
