"""Verify and replay of the gated delta rule: XLA's form and the interpreted kernels against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import KINDS, expected, make_inputs, make_state
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import registry
from pallas_kernels.gated_delta import gpu_records, reference_records, tpu_replay, tpu_verify, xla_records
from pallas_kernels.gated_delta.replay import replay
from pallas_kernels.gated_delta.verify import verify

# Memory that was never written is NaN to the interpreter.
INTERPRETED = {"interpret": pltpu.InterpretParams()}
VERIFY = {
    "xla": jax.jit(xla_records.verify),
    "tpu": jax.jit(functools.partial(tpu_verify.verify, **INTERPRETED)),
    "gpu": jax.jit(functools.partial(gpu_records.verify, interpret=True)),
}
REPLAY = {
    "xla": jax.jit(xla_records.replay),
    "tpu": jax.jit(functools.partial(tpu_replay.replay, **INTERPRETED)),
    "gpu": jax.jit(functools.partial(gpu_records.replay, interpret=True)),
}
TOKENS = 5
right_verify, right_replay = jax.jit(reference_records.verify), jax.jit(reference_records.replay)


def check_verify(implementation, inputs, read_slots, lengths, atol=3e-6):
    """Outputs agree where valid, records everywhere. Returns the records."""
    arguments = (*inputs.values(), make_state(), 1, jnp.array(read_slots), jnp.array(lengths))
    got, right = VERIFY[implementation](*arguments), right_verify(*arguments)
    valid = np.arange(inputs["q"].shape[1]) < np.array(lengths)[:, None]
    np.testing.assert_allclose(np.array(got[0])[valid], np.array(right[0])[valid], atol=atol, rtol=1e-5)
    for record, right_record in zip(got[1:], right[1:], strict=True):
        assert record.dtype == jnp.float32
        np.testing.assert_allclose(record, right_record, atol=atol, rtol=1e-5)
        assert not np.array(record)[~valid].any()
    return got[1:]


def make_records(kind, tokens=TOKENS, **options):
    """From the state's slots 3, 1, 5."""
    inputs = make_inputs(kind, tokens, **options)
    return right_verify(*inputs.values(), make_state(), 1, jnp.array([3, 1, 5]), jnp.full(3, tokens))[1:]


def check_replay(implementation, records, accepted, read_slots=(3, 1, 5), write_slots=(2, 1, 4), state=None):
    state = make_state() if state is None else state
    arguments = (*records, jnp.array(accepted), state, 1, jnp.array(read_slots), jnp.array(write_slots))
    got, right = REPLAY[implementation](*arguments), right_replay(*arguments)
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=1e-5)
    others = np.setdiff1d(np.arange(state.shape[1]), write_slots)
    np.testing.assert_array_equal(got[1, others], state[1, others])
    np.testing.assert_array_equal(got[0], state[0])
    return got


@pytest.mark.parametrize("implementation", VERIFY)
@pytest.mark.parametrize("kind", KINDS)
def test_verify(implementation, kind):
    for decay_scale, lengths in ((1e-4, (5, 3, 0)), (1.0, (1, 5, 4)), (30.0, (5, 5, 2))):
        check_verify(implementation, make_inputs(kind, TOKENS, decay_scale=decay_scale), [3, 1, 3], lengths)


@pytest.mark.parametrize("implementation", VERIFY)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_decay", [0.0, -30.0, -1000.0])
def test_verify_of_extreme_decay(implementation, kind, log_decay):
    inputs = make_inputs(kind, TOKENS)
    inputs["log_decay"] = jnp.full_like(inputs["log_decay"], log_decay)
    check_verify(implementation, inputs, [3, 1, 5], [5, 4, 1])


@pytest.mark.parametrize("implementation", VERIFY)
@pytest.mark.parametrize("kind", KINDS)
def test_verify_of_padding_that_holds_nan(implementation, kind):
    inputs, lengths = make_inputs(kind, TOKENS), [4, 0, 1]
    padding = np.arange(TOKENS) >= np.array(lengths)[:, None]
    check_verify(implementation, {name: x.at[padding].set(jnp.nan) for name, x in inputs.items()}, [3, 0, 5], lengths)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", VERIFY)
@pytest.mark.parametrize(("kind", "tokens"), [("per_head", 1), ("per_channel", 16)])
def test_verify_of_other_numbers_of_tokens(implementation, kind, tokens):
    check_verify(implementation, make_inputs(kind, tokens, decay_scale=0.1), [3, 1, 5], [tokens, 1, tokens - 1])


@pytest.mark.parametrize("kind", KINDS)
def test_verify_of_several_chunks(kind):
    check_verify("xla", make_inputs(kind, 70), [3, 1, 5], [70, 33, 0])


def test_verify_of_bfloat16_on_a_gpu_rounds_nothing_more():
    inputs = make_inputs("per_channel", TOKENS, decay_scale=0.1)
    check_verify("gpu", inputs | {name: inputs[name].astype(jnp.bfloat16) for name in "qkv"}, [3, 1, 5], [5, 4, 1])


@pytest.mark.parametrize("implementation", VERIFY)
def test_verify_of_identical_keys_without_decay(implementation):
    """The system is then the hardest."""
    inputs = make_inputs("per_channel", TOKENS)
    inputs["k"] = jnp.broadcast_to(inputs["k"][:, :1], inputs["k"].shape)
    inputs |= {"log_decay": jnp.zeros_like(inputs["log_decay"]), "beta": jnp.ones_like(inputs["beta"])}
    check_verify(implementation, inputs, [3, 1, 5], [5, 5, 5])


@pytest.mark.parametrize("implementation", REPLAY)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay_scale", [1e-4, 1.0, 30.0])
def test_replay_of_any_number_of_records(implementation, kind, decay_scale):
    records = make_records(kind, decay_scale=decay_scale)
    for first in range(TOKENS + 1):
        check_replay(implementation, records, [first, TOKENS - first, (first + 2) % (TOKENS + 1)])


@pytest.mark.parametrize("implementation", REPLAY)
@pytest.mark.parametrize("kind", KINDS)
def test_replay_ignores_what_was_not_accepted(implementation, kind):
    accepted = np.array([2, 0, 5])
    rejected = np.arange(TOKENS) >= accepted[:, None]
    records = [x.at[rejected].set(jnp.nan) for x in make_records(kind)]
    state = check_replay(implementation, records, accepted, (3, 3, 5), (2, 6, 5))
    assert np.isfinite(state).all()
    np.testing.assert_array_equal(state[1, 6], make_state()[1, 3])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", REPLAY)
def test_replay_of_several_chunks(implementation):
    records = make_records("per_channel", 35, decay_scale=0.1)
    for accepted in ((35, 16, 17), (33, 0, 1)):
        check_replay(implementation, records, accepted)


@pytest.mark.parametrize("implementation", REPLAY)
def test_replay_into_a_state_of_bfloat16(implementation):
    state = make_state().astype(jnp.bfloat16)
    arguments = (jnp.array([5, 2, 0]), state, 1, jnp.array([3, 1, 5]), jnp.array([2, 1, 4]))
    records = make_records("per_head")
    got, right = REPLAY[implementation](*records, *arguments), right_replay(*records, *arguments)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), right.astype(jnp.float32), atol=1e-5, rtol=0.01)


@pytest.mark.parametrize("implementation", VERIFY)
@pytest.mark.parametrize("kind", KINDS)
def test_verify_and_replay_are_as_many_decode_steps(implementation, kind):
    inputs, state = make_inputs(kind, TOKENS, decay_scale=0.1), make_state()
    reads, writes = jnp.array([3, 1, 5]), jnp.array([2, 1, 4])
    _, *records = VERIFY[implementation](*inputs.values(), state, 1, reads, jnp.full(3, TOKENS))
    for accepted in ([0, 1, 2], [3, 4, 5]):
        counts = jnp.array(accepted)
        got = REPLAY[implementation](*records, counts, state, 1, reads, writes)
        _, right = expected(*inputs.values(), state, 1, reads, writes, counts)
        np.testing.assert_allclose(got, right, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("implementation", VERIFY)
def test_two_runs_are_equal_to_the_bit(implementation):
    inputs, slots = make_inputs("per_channel", TOKENS), jnp.array([3, 1, 5])

    def run():
        out, *records = VERIFY[implementation](*inputs.values(), make_state(), 1, slots, jnp.array([5, 3, 4]))
        return out, REPLAY[implementation](*records, jnp.array([2, 3, 1]), make_state(), 1, slots, slots)

    for first, second in zip(run(), run(), strict=True):
        np.testing.assert_array_equal(first, second)


def test_the_public_functions_pass_records_on():
    inputs, state, slots = make_inputs("per_head", TOKENS), make_state(), jnp.array([3, 1, 5])
    with registry.record() as recorder:
        out, records = verify(*inputs.values(), state, 0, slots, jnp.full(3, TOKENS))
        new_state = replay(records, jnp.full(3, TOKENS), state, 0, slots, slots)
    right, right_state = expected(*inputs.values(), state, 0, slots, slots, jnp.full(3, TOKENS))
    np.testing.assert_allclose(out, right, atol=3e-6, rtol=1e-5)
    np.testing.assert_allclose(new_state, right_state, atol=5e-6, rtol=1e-5)
    assert [choice.operator for choice in recorder.choices()] == ["gated_delta_verify", "gated_delta_replay"]


def test_xla_s_replay_copies_no_state_array():
    records = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make_records("per_head")]
    state = jax.ShapeDtypeStruct((2, 400, 2, 128, 256), jnp.float32)
    rows = jax.ShapeDtypeStruct((3,), jnp.int32)
    jitted = jax.jit(lambda *arguments: xla_records.replay(*arguments[:5], 1, *arguments[5:]), donate_argnums=4)
    compiled = jitted.lower(*records, rows, state, rows, rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 400 * 2 * 128 * 256 * 4 / 10


def test_what_the_kernels_refuse():
    q, v, wide = jnp.zeros((1, 17, 1, 128)), jnp.zeros((1, 17, 2, 64)), jnp.zeros((1, 17, 2, 128))
    assert tpu_verify.accepts(q, q, v) == "value_head_dim 64 is not a multiple of 128"
    assert tpu_verify.accepts(q, q, wide) == "17 draft tokens are more than 16"
    assert tpu_verify.accepts(q[:, 1:], q[:, 1:], wide[:, 1:]) is None
    assert tpu_replay.accepts(v, wide) == "key_head_dim 64 is not a multiple of 128"
    assert tpu_replay.accepts(q, wide) is None
    assert gpu_records.accepts(q, q, v) is None
    assert gpu_records.accepts(q[..., :96], q[..., :96], v) == "key_head_dim 96 is not 32, 64, 128 or 256"
    assert gpu_records.accepts_records(q, v[..., :48]) == "value_head_dim 48 is not 32, 64, 128 or 256"
    assert gpu_records.accepts_records(q, wide) is None
