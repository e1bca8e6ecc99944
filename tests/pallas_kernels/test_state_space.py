"""The recurrences of Mamba-2 (`ssd`) and Mamba-1 (`selective_scan`): one suite, since their arguments correspond."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import registry
from pallas_kernels.selective_scan import selective_scan
from pallas_kernels.ssd import ssd

OPERATORS = {"ssd": ssd, "selective_scan": selective_scan}
# Most tests share two shapes, three rows of 1 or 70 tokens, since compiling is most of their time.
TOKENS = 70
HEADS, HEAD_DIM, GROUPS, CHANNELS, STATE, LAYERS, SLOTS = 6, 10, 2, 44, 12, 2, 7

both = pytest.mark.parametrize("name", OPERATORS)
fast = {name: jax.jit(function) for name, function in OPERATORS.items()}


@functools.partial(jax.jit, static_argnums=0)
def reference(name, *arguments):
    with registry.force("reference"):
        return OPERATORS[name](*arguments)


def make_inputs(name, batch=3, tokens=TOKENS, seed=0, rate=1.0):
    """Everything before the state, in the order of the arguments."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    channels = (HEADS,) if name == "ssd" else (CHANNELS,)
    heads, rates, groups = ((HEAD_DIM,), (), (GROUPS,)) if name == "ssd" else ((), (STATE,), ())
    return {
        "x": normal(batch, tokens, *channels, *heads),
        "dt": jax.nn.softplus(2 * normal(batch, tokens, *channels)),
        "A": -rate * jnp.exp(normal(*rates, *channels)),
        "B": normal(batch, tokens, *groups, STATE),
        "C": normal(batch, tokens, *groups, STATE),
        "D": normal(*channels),
    }


PER_TOKEN = ("x", "dt", "B", "C")


def make_state(name, seed=1):
    shape = (HEADS, HEAD_DIM, STATE) if name == "ssd" else (STATE, CHANNELS)
    return jnp.asarray(np.random.default_rng(seed).standard_normal((LAYERS, SLOTS, *shape)), jnp.float32)


def check(name, inputs, read_slots, write_slots, lengths, layer=1):
    """Both implementations agree on valid outputs and on the whole state array; returns the fast one's result."""
    state = make_state(name)
    arguments = (*inputs.values(), state, layer, *map(jnp.array, (read_slots, write_slots, lengths)))
    out, new_state = fast[name](*arguments)
    expected, expected_state = reference(name, *arguments)
    valid = np.arange(out.shape[1]) < np.array(lengths)[:, None]
    for got, want in ((np.array(out)[valid], np.array(expected)[valid]), (new_state, expected_state)):
        np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max(initial=1), rtol=1e-5)
    untouched = np.ones(SLOTS, bool)
    untouched[list(write_slots)] = False
    np.testing.assert_array_equal(new_state[layer][untouched], state[layer][untouched])
    np.testing.assert_array_equal(new_state[1 - layer], state[1 - layer])
    return out, new_state


def test_the_reference_of_ssd_is_the_equation():
    inputs, state = make_inputs("ssd", 1, 3), make_state("ssd")
    out, new_state = reference("ssd", *inputs.values(), state, 0, jnp.array([4]), jnp.array([2]), jnp.array([3]))
    x, dt, A, B, C, D = (np.array(value, np.float64) for value in inputs.values())
    head, group = 4, 1  # three heads a group
    h = np.array(state[0, 4, head], np.float64)
    for t in range(3):
        h = np.exp(dt[0, t, head] * A[head]) * h + np.outer(dt[0, t, head] * x[0, t, head], B[0, t, group])
        np.testing.assert_allclose(out[0, t, head], h @ C[0, t, group] + D[head] * x[0, t, head], atol=2e-6)
    np.testing.assert_allclose(new_state[0, 2, head], h, atol=2e-6)


def test_the_reference_of_selective_scan_is_the_equation():
    name = "selective_scan"
    inputs, state = make_inputs(name, 1, 3), make_state(name)
    out, new_state = reference(name, *inputs.values(), state, 0, jnp.array([4]), jnp.array([2]), jnp.array([3]))
    x, dt, A, B, C, D = (np.array(value, np.float64) for value in inputs.values())
    channel = 31
    h = np.array(state[0, 4, :, channel], np.float64)
    for t in range(3):
        h = np.exp(dt[0, t, channel] * A[:, channel]) * h + dt[0, t, channel] * x[0, t, channel] * B[0, t]
        np.testing.assert_allclose(out[0, t, channel], h @ C[0, t] + D[channel] * x[0, t, channel], atol=2e-6)
    np.testing.assert_allclose(new_state[0, 2, :, channel], h, atol=2e-6)


@both
@pytest.mark.parametrize("tokens", [2, 63, 64, 65])
def test_agrees_with_the_reference(name, tokens):
    check(name, make_inputs(name, 3, tokens), [3, 1, 5], [2, 6, 4], [tokens, max(tokens - 3, 0), 0])


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(list(OPERATORS)),
    lengths=st.lists(st.integers(0, TOKENS), min_size=3, max_size=3),
    read_slots=st.lists(st.integers(0, SLOTS - 1), min_size=3, max_size=3),
    write_slots=st.permutations(range(1, SLOTS)),
    rate=st.sampled_from([1e-4, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_agrees_with_the_reference_on_any_lengths_and_slots(name, lengths, read_slots, write_slots, rate, seed):
    check(name, make_inputs(name, seed=seed, rate=rate), read_slots, write_slots[:3], lengths)


@both
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_rows_of_length_zero_copy_their_state(name, tokens):
    _, state = check(name, make_inputs(name, 3, tokens), [3, 0, 4], [5, 0, 1], [0, 0, tokens])
    np.testing.assert_array_equal(state[1, 5], make_state(name)[1, 3])
    np.testing.assert_array_equal(state[1, 0], make_state(name)[1, 0])


@both
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_padding_rows_share_the_null_slot(name, tokens):
    check(name, make_inputs(name, 3, tokens), [0, 3, 0], [0, 3, 0], [0, tokens, 0])


@both
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_a_fork_reads_one_slot_twice_and_may_write_another_row_s_read_slot(name, tokens):
    check(name, make_inputs(name, 3, tokens), [3, 3, 4], [4, 3, 1], [tokens, tokens, tokens])


@both
@pytest.mark.parametrize("parts", [(1, 1, 1), (70, 1, 5), (3, 64, 9)])
def test_continuing_from_the_state_equals_one_call(name, parts):
    """Pieces are padded to 1 or 70 tokens; each reads the slot that the one before it wrote."""
    inputs, state = make_inputs(name, tokens=sum(parts)), make_state(name)
    first, last = jnp.array([3, 1, 5]), jnp.array([4, 2, 6])
    whole, whole_state = fast[name](*inputs.values(), state, 1, first, last, jnp.full(3, sum(parts)))
    outs, start, slots = [], 0, first
    for part in parts:
        size = 1 if part == 1 else TOKENS
        piece = dict(inputs)
        for key in PER_TOKEN:
            value = inputs[key][:, start : start + part]
            piece[key] = jnp.pad(value, [(0, 0), (0, size - part), *[(0, 0)] * (value.ndim - 2)])
        out, state = fast[name](*piece.values(), state, 1, slots, last, jnp.full(3, part))
        outs.append(out[:, :part])
        start, slots = start + part, last
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(state[1, last], whole_state[1, last], atol=1e-5, rtol=1e-5)


@both
@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -30.0, -1000.0])
def test_extreme_decays(name, log_decay, tokens):
    inputs = make_inputs(name, 3, tokens)
    inputs["dt"] = jnp.ones_like(inputs["dt"])
    inputs["A"] = jnp.full_like(inputs["A"], log_decay)
    out, _ = check(name, inputs, [3, 1, 5], [2, 6, 4], [tokens, tokens, 1])
    assert np.isfinite(out).all()


@both
def test_weak_decay_after_strong_decay_keeps_its_precision(name):
    """A difference of running sums near -900 would have only four digits left."""
    inputs = make_inputs(name, rate=0.01)
    inputs["dt"] = inputs["dt"].at[:, :30].set(3000.0)
    inputs["x"] = inputs["x"].at[:, :30].multiply(1e-4)
    check(name, inputs, [3, 1, 5], [2, 6, 4], [TOKENS] * 3)


@both
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_padding_may_hold_nan(name, tokens):
    inputs, lengths = make_inputs(name, 3, tokens), [tokens, tokens // 2, 0]
    padding = np.arange(tokens) >= np.array(lengths)[:, None]
    inputs |= {key: inputs[key].at[padding].set(jnp.nan) for key in PER_TOKEN}
    out, state = check(name, inputs, [3, 1, 4], [2, 6, 5], lengths)
    assert np.isfinite(state).all()
    assert np.isfinite(np.array(out)[~padding]).all()


@both
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_a_poisoned_slot_reaches_only_its_readers(name, tokens):
    state = make_state(name).at[:, 5].set(jnp.nan)
    slots = jnp.array([5, 1, 2]), jnp.array([3, 1, 5]), jnp.full(3, tokens)
    out, new_state = fast[name](*make_inputs(name, 3, tokens).values(), state, 1, *slots)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()
    assert np.isfinite(new_state[1, jnp.array([1, 5])]).all()


@both
def test_two_runs_are_bit_equal(name):
    arguments = make_state(name), 1, jnp.array([3, 1, 5]), jnp.array([2, 6, 4]), jnp.array([TOKENS, 40, 1])
    first, second = (fast[name](*make_inputs(name).values(), *arguments) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@both
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_layer_may_be_traced_under_scan(name, tokens):
    inputs, state = make_inputs(name, 3, tokens), make_state(name)
    slots = jnp.array([3, 1, 5]), jnp.array([2, 6, 4]), jnp.full(3, tokens)

    def body(state, layer):
        out, state = OPERATORS[name](*inputs.values(), state, layer, *slots)
        return state, out

    scanned, outs = jax.jit(lambda s: jax.lax.scan(body, s, jnp.arange(LAYERS)))(state)
    for layer in range(LAYERS):
        out, state = fast[name](*inputs.values(), state, layer, *slots)
        np.testing.assert_allclose(outs[layer], out, atol=1e-5)
    np.testing.assert_allclose(scanned, state, atol=1e-5)


@both
def test_low_precision_inputs_are_computed_in_float32(name):
    inputs = {key: value.astype(jnp.bfloat16) for key, value in make_inputs(name).items()}
    out, state = check(name, inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 60, 0])
    assert out.dtype == state.dtype == jnp.float32


@both
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_state_keeps_its_dtype(name, tokens):
    state = make_state(name).astype(jnp.bfloat16)
    slots = jnp.array([3]), jnp.array([2]), jnp.array([tokens])
    arguments = (*make_inputs(name, 1, tokens).values(), state, 0, *slots)
    out, new_state = fast[name](*arguments)
    expected, expected_state = reference(name, *arguments)
    assert new_state.dtype == expected_state.dtype == jnp.bfloat16
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(new_state.astype(jnp.float32), expected_state.astype(jnp.float32), atol=1e-5, rtol=0.01)


@both
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_the_donated_state_is_never_copied(name, batch, tokens):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make_inputs(name, batch, tokens).values()]
    few = make_state(name).shape
    state = jax.ShapeDtypeStruct((LAYERS, 3000, *few[2:]), jnp.float32)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (batch,), (batch,), (batch,))]
    compiled = jax.jit(OPERATORS[name], donate_argnums=6).lower(*shapes, state, *integers).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < state.size * 4 / 10


@both
def test_the_registry_records_the_choice(name):
    slots = jnp.array([1]), jnp.array([1]), jnp.array([2])
    with registry.record() as recorder:
        OPERATORS[name](*make_inputs(name, 1, 2).values(), make_state(name), 0, *slots)
    assert [(c.operator, c.implementation) for c in recorder.choices()] == [(name, "xla")]
