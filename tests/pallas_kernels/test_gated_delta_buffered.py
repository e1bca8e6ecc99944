"""Buffered decode of the gated delta rule: XLA's form and the interpreted kernels against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import KEY_DIM, KINDS, LAYERS, VALUE_DIM, VALUE_HEADS, expected, make_inputs, make_state
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_delta import gpu_records, reference_records, tpu_buffered, xla_records
from pallas_kernels.gated_delta.buffered import buffered
from pallas_kernels.gated_delta.records import DeltaRecords, make_ring
from pallas_kernels.gated_delta.replay import replay
from pallas_kernels.ring import next_cursors

RUN = {
    "xla": jax.jit(xla_records.buffered),
    # Memory that was never written is NaN to the interpreter.
    "tpu": jax.jit(functools.partial(tpu_buffered.buffered, interpret=pltpu.InterpretParams())),
    "gpu": jax.jit(functools.partial(gpu_records.buffered, interpret=True)),
}
SIZE = 4
right_run = jax.jit(reference_records.buffered)


def empty_ring(kind, slots=7, key_heads=1, fill=jnp.nan):
    """What was never written is NaN: nothing of it may be used."""
    dims = (LAYERS, slots, SIZE, key_heads, KEY_DIM, VALUE_HEADS, VALUE_DIM)
    return jax.tree.map(lambda x: jnp.full_like(x, fill), make_ring(*dims, per_channel=kind == "per_channel"))


def filled_ring(kind, cursors, read_slots, key_heads=1, **options):
    """Records made from the state in each row's read slot, as many as its cursor says."""
    ring = empty_ring(kind, key_heads=key_heads)
    for row, (cursor, slot) in enumerate(zip(cursors, read_slots, strict=True)):
        inputs = make_inputs(kind, SIZE, seed=20 + row, batch=1, key_heads=key_heads, **options)
        one = jnp.array([slot])
        _, *records = reference_records.verify(*inputs.values(), make_state(), 1, one, jnp.array([cursor]))
        place = (1, slot, slice(cursor))
        ring = DeltaRecords(
            *(leaf.at[place].set(new[0, :cursor]) for leaf, new in zip(ring.leaves(), records, strict=True))
        )
    return ring


def check(run, inputs, ring, read_slots, write_slots, cursors, lengths, state=None):
    """One step agrees in its output, in the state, and in the rings as far as they are filled."""
    state = make_state() if state is None else state
    integers = map(jnp.array, (read_slots, write_slots, cursors, lengths))
    arguments = (*inputs.values(), state, *ring.leaves(), 1, *integers)
    out, got, *leaves = run(*arguments)
    right_out, right, *right_leaves = right_run(*arguments)
    valid = np.array(lengths) > 0
    np.testing.assert_allclose(np.array(out)[valid], np.array(right_out)[valid], atol=5e-6, rtol=1e-5)
    np.testing.assert_allclose(got, right, atol=5e-6, rtol=1e-5)
    after = next_cursors(jnp.array(cursors), jnp.array(lengths), SIZE)
    for leaf, right_leaf, before in zip(leaves, right_leaves, ring.leaves(), strict=True):
        for slot, cursor in zip(write_slots, after, strict=True):
            np.testing.assert_allclose(leaf[1, slot, :cursor], right_leaf[1, slot, :cursor], atol=5e-6, rtol=1e-5)
        others = np.setdiff1d(np.arange(state.shape[1]), write_slots)
        np.testing.assert_array_equal(leaf[1, others], before[1, others])
        np.testing.assert_array_equal(leaf[0], before[0])
    return out, got, leaves


@pytest.mark.parametrize("implementation", RUN)
@pytest.mark.parametrize("kind", KINDS)
def test_one_step(implementation, kind):
    """Empty and partly filled rings, one that fills up; staying, forking, padding with NaN."""
    for decay_scale in (1e-4, 1.0, 30.0):
        for reads, writes, cursors, lengths in (
            ([3, 1, 5], [3, 1, 5], [0, 2, 3], [1, 1, 1]),
            ([3, 3, 5], [2, 4, 6], [1, 1, 3], [1, 1, 1]),
            ([4, 1, 0], [6, 1, 0], [3, 3, 0], [0, 1, 0]),
        ):
            inputs = make_inputs(kind, 1, decay_scale=decay_scale)
            inputs = {name: x.at[np.array(lengths) == 0].set(jnp.nan) for name, x in inputs.items()}
            ring = filled_ring(kind, cursors, reads, decay_scale=decay_scale)
            _, state, _ = check(RUN[implementation], inputs, ring, reads, writes, cursors, lengths)
            assert np.isfinite(state).all()


@pytest.mark.parametrize("implementation", RUN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_decay", [0.0, -30.0, -1000.0])
def test_extreme_decay(implementation, kind, log_decay):
    inputs, cursors, slots = make_inputs(kind, 1), [1, 2, 3], [3, 1, 5]
    inputs["log_decay"] = jnp.full_like(inputs["log_decay"], log_decay)
    ring = filled_ring(kind, cursors, slots)
    ring = DeltaRecords(ring.k, ring.u, jnp.where(jnp.isnan(ring.log_decay), ring.log_decay, log_decay))
    check(RUN[implementation], inputs, ring, slots, slots, cursors, [1, 1, 1])


@pytest.mark.parametrize("implementation", RUN)
@pytest.mark.parametrize("kind", KINDS)
def test_many_steps_are_plain_decode(implementation, kind):
    """Through several folds, from cursors that differ; a row forks on its way, another one pauses."""
    tokens, pause = 11, 6
    inputs, state = make_inputs(kind, tokens, decay_scale=0.1), make_state()
    ring, cursors, slots = empty_ring(kind), jnp.array([0, 0, 0]), jnp.array([3, 1, 5])
    right, right_state = expected(*inputs.values(), state, 1, slots, slots, jnp.array([tokens, tokens - 1, tokens]))
    counts = np.zeros(3, int)
    for step in range(tokens):
        lengths = jnp.array([1, step != pause, 1])
        token = [jnp.take_along_axis(x, counts.reshape(3, *(1,) * (x.ndim - 1)), 1) for x in inputs.values()]
        targets = slots.at[0].set(6) if step == 5 else slots
        arguments = (*token, state, *ring.leaves(), 1, slots, targets, cursors, lengths)
        out, state, *leaves = RUN[implementation](*arguments)
        ring, cursors, slots = DeltaRecords(*leaves), next_cursors(cursors, lengths, SIZE), targets
        for row in np.flatnonzero(lengths):
            np.testing.assert_allclose(out[row, 0], right[row, counts[row]], atol=5e-6, rtol=1e-5)
        counts += np.array(lengths)
    records = jax.tree.map(lambda x: x[1, slots], ring)
    state = replay(records, cursors, state, 1, slots, slots)
    np.testing.assert_allclose(state[1, slots], right_state[1, jnp.array([3, 1, 5])], atol=5e-6, rtol=1e-5)


@pytest.mark.slow
def test_heads_in_several_blocks(monkeypatch):
    monkeypatch.setattr(tpu_buffered, "heads_per_block", lambda *_: 1)
    run = jax.jit(functools.partial(tpu_buffered.buffered, interpret=pltpu.InterpretParams()))
    cursors, reads, writes = [1, 3, 3], [3, 1, 5], [2, 1, 4]
    ring = filled_ring("per_channel", cursors, reads, key_heads=2)
    check(run, make_inputs("per_channel", 1, key_heads=2), ring, reads, writes, cursors, [1, 1, 1])


@pytest.mark.slow
def test_two_cores_share_the_rows_without_a_race(capfd):
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True, random_seed=4)
    run = jax.jit(functools.partial(tpu_buffered.buffered, interpret=params))
    cursors, reads, writes = [1, 3, 3, 2], [3, 1, 5, 3], [2, 1, 4, 6]
    ring = filled_ring("per_head", cursors[:3], reads[:3])
    check(run, make_inputs("per_head", 1, batch=4), ring, reads, writes, [1, 3, 3, 1], [1, 1, 1, 1])
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("implementation", ["tpu", "gpu"])
def test_two_runs_are_equal_to_the_bit(implementation):
    cursors, slots = [1, 3, 2], [3, 1, 5]
    ring = filled_ring("per_channel", cursors, slots)
    integers = tuple(map(jnp.array, (slots, slots, cursors, [1, 1, 1])))
    arguments = (*make_inputs("per_channel", 1).values(), make_state(), *ring.leaves(), 1, *integers)
    for first, second in zip(RUN[implementation](*arguments), RUN[implementation](*arguments), strict=True):
        np.testing.assert_array_equal(first, second)


def test_the_public_function_passes_the_ring_on():
    cursors, slots, one = [1, 3, 2], jnp.array([3, 1, 5]), jnp.array([1, 1, 1])
    ring, inputs = filled_ring("per_head", cursors, [3, 1, 5]), make_inputs("per_head", 1)
    out, state, new_ring = buffered(*inputs.values(), make_state(), ring, 1, slots, slots, jnp.array(cursors), one)
    right = right_run(*inputs.values(), make_state(), *ring.leaves(), 1, slots, slots, jnp.array(cursors), one)
    np.testing.assert_allclose(out, right[0], atol=5e-6)
    np.testing.assert_allclose(state, right[1], atol=5e-6)
    np.testing.assert_allclose(new_ring.u[1, 3, :2], right[3][1, 3, :2], atol=5e-6)


def test_what_the_kernel_refuses():
    q, v = jnp.zeros((1, 1, 1, 128)), jnp.zeros((1, 1, 2, 128))
    for size, refusal in ((16, None), (17, "a ring of 17 records is more than 16")):
        ring = make_ring(1, 2, size, 1, 128, 2, 128, per_channel=False)
        assert tpu_buffered.accepts(q, q, v, q, q, v, *ring.leaves()) == refusal
    assert tpu_buffered.accepts(v[..., :64], q, v, q, q, v, q) == "key_head_dim 64 is not a multiple of 128"
