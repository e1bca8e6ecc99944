"""Mamba-2's forms on update records: XLA's and the interpreted kernels' against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import registry
from pallas_kernels.ring import next_cursors
from pallas_kernels.ssd import (
    gpu_records,
    reference,
    reference_records,
    tpu_buffered,
    tpu_replay,
    tpu_verify,
    xla_records,
)
from pallas_kernels.ssd.buffered import buffered
from pallas_kernels.ssd.records import SsdRecords, make_ring
from pallas_kernels.ssd.replay import replay
from pallas_kernels.ssd.verify import verify

LAYERS, SLOTS, HEADS, HEAD_DIM, GROUPS, WIDTH = 2, 7, 8, 64, 2, 128
TOKENS, SIZE = 5, 4
# Memory that was never written is NaN to the interpreter.
TPU = {"interpret": pltpu.InterpretParams()}
VERIFY = {
    "xla": jax.jit(xla_records.verify),
    "tpu": jax.jit(functools.partial(tpu_verify.verify, **TPU)),
    "gpu": jax.jit(functools.partial(gpu_records.verify, interpret=True)),
}
REPLAY = {
    "xla": jax.jit(xla_records.replay),
    "tpu": jax.jit(functools.partial(tpu_replay.replay, **TPU)),
    "gpu": jax.jit(functools.partial(gpu_records.replay, interpret=True)),
}
BUFFERED = {
    "xla": jax.jit(xla_records.buffered),
    "tpu": jax.jit(functools.partial(tpu_buffered.buffered, **TPU)),
    "gpu": jax.jit(functools.partial(gpu_records.buffered, interpret=True)),
}
IMPLEMENTATIONS = list(VERIFY)
right_run, right_verify = jax.jit(reference.ssd), jax.jit(reference_records.verify)
right_replay, right_buffered = jax.jit(reference_records.replay), jax.jit(reference_records.buffered)


def make_inputs(tokens=TOKENS, seed=0, decay_scale=1.0, batch=3):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "x": normal(batch, tokens, HEADS, HEAD_DIM),
        "dt": jax.nn.softplus(normal(batch, tokens, HEADS)),
        "A": -decay_scale * jnp.exp(2 * normal(HEADS)),
        "B": normal(batch, tokens, GROUPS, WIDTH) / 8,
        "C": normal(batch, tokens, GROUPS, WIDTH) / 8,
        "D": normal(HEADS),
    }


def poisoned(inputs, lengths):
    padding = np.arange(inputs["x"].shape[1]) >= np.array(lengths)[:, None]
    return {name: x if name in "AD" else x.at[padding].set(jnp.nan) for name, x in inputs.items()}


def make_state():
    shape = (LAYERS, SLOTS, HEADS, HEAD_DIM, WIDTH)
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


def close(got, right):
    np.testing.assert_allclose(got, right, atol=5e-6, rtol=1e-5)


def check_verify(implementation, inputs, read_slots, lengths):
    arguments = (*inputs.values(), make_state(), 1, jnp.array(read_slots), jnp.array(lengths))
    got, right = VERIFY[implementation](*arguments), right_verify(*arguments)
    valid = np.arange(inputs["x"].shape[1]) < np.array(lengths)[:, None]
    close(np.array(got[0])[valid], np.array(right[0])[valid])
    for record, right_record in zip(got[1:], right[1:], strict=True):
        close(record, right_record)
        assert not np.array(record)[~valid].any()


def make_records(tokens=TOKENS, **options):
    lengths = jnp.full(3, tokens)
    return right_verify(*make_inputs(tokens, **options).values(), make_state(), 1, jnp.array([3, 1, 5]), lengths)[1:]


def check_replay(implementation, records, accepted, read_slots=(3, 1, 5), write_slots=(2, 1, 4)):
    state = make_state()
    arguments = (*records, jnp.array(accepted), state, 1, jnp.array(read_slots), jnp.array(write_slots))
    got = REPLAY[implementation](*arguments)
    close(got, right_replay(*arguments))
    others = np.setdiff1d(np.arange(SLOTS), write_slots)
    np.testing.assert_array_equal(got[1, others], state[1, others])
    return got


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_verify(implementation):
    for decay_scale, lengths in ((1e-4, (5, 3, 0)), (1.0, (1, 5, 4)), (300.0, (5, 5, 2))):
        check_verify(implementation, poisoned(make_inputs(decay_scale=decay_scale), lengths), [3, 1, 3], lengths)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 16])
def test_verify_of_other_numbers_of_tokens(implementation, tokens):
    check_verify(implementation, make_inputs(tokens, decay_scale=0.1), [3, 1, 5], [tokens, 1, tokens - 1])


def test_verify_of_bfloat16_on_a_gpu_rounds_nothing_more():
    inputs = make_inputs(decay_scale=0.1)
    check_verify("gpu", inputs | {name: inputs[name].astype(jnp.bfloat16) for name in "xBC"}, [3, 1, 5], [5, 4, 1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("decay_scale", [1e-4, 1.0, 300.0])
def test_replay_of_any_number_of_records(implementation, decay_scale):
    records = make_records(decay_scale=decay_scale)
    for first in range(TOKENS + 1):
        check_replay(implementation, records, [first, TOKENS - first, (first + 2) % (TOKENS + 1)])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_replay_ignores_what_was_not_accepted(implementation):
    accepted = np.array([2, 0, 5])
    rejected = np.arange(TOKENS) >= accepted[:, None]
    records = [x.at[rejected].set(jnp.nan) for x in make_records()]
    state = check_replay(implementation, records, accepted, (3, 3, 5), (2, 6, 5))
    np.testing.assert_array_equal(state[1, 6], make_state()[1, 3])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_replay_of_several_chunks(implementation):
    records = make_records(35, decay_scale=0.1)
    for accepted in ((35, 16, 17), (33, 0, 1)):
        check_replay(implementation, records, accepted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_verify_and_replay_are_as_many_decode_steps(implementation):
    inputs, state = make_inputs(decay_scale=0.1), make_state()
    reads, writes = jnp.array([3, 1, 5]), jnp.array([2, 1, 4])
    _, *records = VERIFY[implementation](*inputs.values(), state, 1, reads, jnp.full(3, TOKENS))
    for accepted in ([0, 1, 2], [3, 4, 5]):
        counts = jnp.array(accepted)
        _, right = right_run(*inputs.values(), state, 1, reads, writes, counts)
        close(REPLAY[implementation](*records, counts, state, 1, reads, writes), right)


def filled_ring(cursors, read_slots, **options):
    """Made from each row's own state; what was never written is NaN."""
    dims = (LAYERS, SLOTS, SIZE, HEADS, HEAD_DIM, GROUPS, WIDTH)
    leaves = [jnp.full_like(leaf, jnp.nan) for leaf in make_ring(*dims).leaves()]
    records = make_records(SIZE, seed=20, **options)
    for row, (cursor, slot) in enumerate(zip(cursors, read_slots, strict=True)):
        place = (1, slot, slice(cursor))
        leaves = [leaf.at[place].set(new[row, :cursor]) for leaf, new in zip(leaves, records, strict=True)]
    return SsdRecords(*leaves)


def check_buffered(run, inputs, ring, read_slots, write_slots, cursors, lengths):
    """One step agrees in its output, in the state, and in the rings as far as they are filled."""
    state = make_state()
    integers = tuple(map(jnp.array, (read_slots, write_slots, cursors, lengths)))
    arguments = (*inputs.values(), state, *ring.leaves(), 1, *integers)
    (out, got, *leaves), (right_out, right, *right_leaves) = run(*arguments), right_buffered(*arguments)
    valid = np.array(lengths) > 0
    close(np.array(out)[valid], np.array(right_out)[valid])
    close(got, right)
    others = np.setdiff1d(np.arange(SLOTS), write_slots)
    for leaf, right_leaf, before in zip(leaves, right_leaves, ring.leaves(), strict=True):
        for slot, cursor in zip(write_slots, next_cursors(integers[2], integers[3], SIZE), strict=True):
            close(leaf[1, slot, :cursor], right_leaf[1, slot, :cursor])
        np.testing.assert_array_equal(leaf[1, others], before[1, others])
        np.testing.assert_array_equal(leaf[0], before[0])
    assert np.isfinite(got).all()


STEPS = [
    ([3, 1, 5], [3, 1, 5], [0, 2, 3], [1, 1, 1]),
    ([3, 3, 5], [2, 4, 6], [1, 1, 3], [1, 1, 1]),
    ([4, 1, 0], [6, 1, 0], [3, 3, 0], [0, 1, 0]),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_buffered_step(implementation):
    """Empty and partly filled rings, one that fills up; staying, forking, padding with NaN."""
    for decay_scale in (1e-4, 1.0, 300.0):
        for reads, writes, cursors, lengths in STEPS:
            ring = filled_ring(cursors, reads, decay_scale=decay_scale)
            inputs = poisoned(make_inputs(1, decay_scale=decay_scale), lengths)
            check_buffered(BUFFERED[implementation], inputs, ring, reads, writes, cursors, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 4])
def test_buffered_heads_in_several_blocks(heads, monkeypatch):
    """Half a group a block, and a group."""
    monkeypatch.setattr(tpu_buffered, "heads_per_block", lambda *_: heads)
    run = jax.jit(functools.partial(tpu_buffered.buffered, **TPU))
    reads, writes, cursors, lengths = STEPS[1]
    check_buffered(run, make_inputs(1), filled_ring(cursors, reads), reads, writes, cursors, lengths)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_many_buffered_steps_are_plain_decode(implementation):
    """Through several folds, from cursors that differ; a row forks on its way, another one pauses."""
    tokens, pause = 11, 6
    inputs, state = make_inputs(tokens, decay_scale=0.1), make_state()
    dims = (LAYERS, SLOTS, SIZE, HEADS, HEAD_DIM, GROUPS, WIDTH)
    ring, cursors, slots = make_ring(*dims), jnp.array([0, 0, 0]), jnp.array([3, 1, 5])
    right, right_state = right_run(*inputs.values(), state, 1, slots, slots, jnp.array([tokens, tokens - 1, tokens]))
    counts = np.zeros(3, int)
    for step in range(tokens):
        lengths = jnp.array([1, step != pause, 1])
        token = [
            x if name in "AD" else jnp.take_along_axis(x, counts.reshape(3, *(1,) * (x.ndim - 1)), 1)
            for name, x in inputs.items()
        ]
        targets = slots.at[0].set(6) if step == 5 else slots
        arguments = (*token, state, *ring.leaves(), 1, slots, targets, cursors, lengths)
        out, state, *leaves = BUFFERED[implementation](*arguments)
        ring, cursors, slots = SsdRecords(*leaves), next_cursors(cursors, lengths, SIZE), targets
        for row in np.flatnonzero(lengths):
            close(out[row, 0], right[row, counts[row]])
        counts += np.array(lengths)
    records = jax.tree.map(lambda x: x[1, slots], ring)
    state = replay(records, cursors, state, 1, slots, slots)
    close(state[1, slots], right_state[1, jnp.array([3, 1, 5])])


@pytest.mark.parametrize("implementation", ["tpu", "gpu"])
def test_two_runs_are_equal_to_the_bit(implementation):
    inputs, slots = make_inputs(), jnp.array([3, 1, 5])
    out, *records = VERIFY[implementation](*inputs.values(), make_state(), 1, slots, jnp.array([5, 3, 4]))
    again, *_ = VERIFY[implementation](*inputs.values(), make_state(), 1, slots, jnp.array([5, 3, 4]))
    np.testing.assert_array_equal(out, again)
    arguments = (*records, jnp.array([2, 3, 1]), make_state(), 1, slots, slots)
    first, second = (REPLAY[implementation](*arguments) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_the_public_functions_pass_records_on():
    inputs, state, slots = make_inputs(), make_state(), jnp.array([3, 1, 5])
    with registry.record() as recorder:
        out, records = verify(*inputs.values(), state, 0, slots, jnp.full(3, TOKENS))
        new_state = replay(records, jnp.full(3, TOKENS), state, 0, slots, slots)
        ring, token = filled_ring([1, 3, 2], [3, 1, 5]), make_inputs(1)
        cursors, one = jnp.array([1, 3, 2]), jnp.ones(3, jnp.int32)
        got = buffered(*token.values(), state, ring, 1, slots, slots, cursors, one)
    right, right_state = right_run(*inputs.values(), state, 0, slots, slots, jnp.full(3, TOKENS))
    close(out, right)
    close(new_state, right_state)
    close(got[0], right_buffered(*token.values(), state, *ring.leaves(), 1, slots, slots, cursors, one)[0])
    assert [choice.operator for choice in recorder.choices()] == ["ssd_verify", "ssd_replay", "ssd_buffered"]


def test_what_the_kernels_refuse():
    inputs = make_inputs(17)
    assert tpu_verify.accepts(*inputs.values()) == "17 draft tokens are more than 16"
    assert tpu_verify.accepts(*make_inputs(16).values()) is None
    assert tpu_verify.accepts_shapes(8, 64, 2, 96) == "state_size 96 is not a multiple of 128"
    assert tpu_verify.accepts_shapes(8, 24, 2, 128) == "4 heads of 24 a group are not a multiple of 128"
    assert gpu_records.accepts(*inputs.values()) is None
    narrow = inputs | {"x": inputs["x"][..., :48]}
    assert gpu_records.accepts(*narrow.values()) == "head_dim 48 is not 16, 32, 64, 128 or 256"
    leaves = make_records()
    assert gpu_records.accepts_records(*leaves, None, make_state()) is None
    assert gpu_records.accepts_records(*leaves, None, make_state()[..., :24]) == (
        "state_size 24 is not 16, 32, 64, 128 or 256"
    )
    for size, refusal in ((16, None), (17, "a ring of 17 records is more than 16")):
        ring = make_ring(1, 2, size, HEADS, HEAD_DIM, GROUPS, WIDTH)
        assert tpu_buffered.accepts(*make_inputs(1).values(), make_state(), *ring.leaves()) == refusal
