import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import registry
from pallas_kernels.short_conv import short_conv

CHANNELS, WIDTH, LAYERS, SLOTS = 10, 4, 2, 7

fast = jax.jit(short_conv)


@jax.jit
def reference(*arguments):
    with registry.force("reference"):
        return short_conv(*arguments)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def make_state(width=WIDTH):
    return normal(1, LAYERS, SLOTS, width - 1, CHANNELS)


def check(x, read_slots, write_slots, lengths, bias=None, width=WIDTH, layer=1):
    """Both implementations agree on valid outputs and on the whole state array; returns the fast one's result."""
    state, weight = make_state(width), normal(2, CHANNELS, width)
    arguments = (x, weight, state, layer, *map(jnp.array, (read_slots, write_slots, lengths)), bias)
    out, new_state = fast(*arguments)
    expected, expected_state = reference(*arguments)
    valid = np.arange(x.shape[1]) < np.array(lengths)[:, None]
    np.testing.assert_allclose(np.array(out)[valid], np.array(expected)[valid], atol=1e-6)
    np.testing.assert_array_equal(new_state, expected_state)
    untouched = np.ones(SLOTS, bool)
    untouched[list(write_slots)] = False
    np.testing.assert_array_equal(new_state[layer][untouched], state[layer][untouched])
    np.testing.assert_array_equal(new_state[1 - layer], state[1 - layer])
    return out, new_state


def test_the_reference_is_the_equation():
    x, weight, bias, state = normal(0, 1, 5, CHANNELS), normal(2, CHANNELS, WIDTH), normal(3, CHANNELS), make_state()
    out, new_state = reference(x, weight, state, 0, jnp.array([4]), jnp.array([2]), jnp.array([5]), bias)
    inputs = np.concatenate([state[0, 4], x[0]])
    for t in range(5):
        y = bias + sum(weight[:, j] * inputs[t + j] for j in range(WIDTH))
        np.testing.assert_allclose(out[0, t], y / (1 + np.exp(-y)), atol=1e-6)
    np.testing.assert_array_equal(new_state[0, 2], x[0, -3:])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 65])
@pytest.mark.parametrize("bias", [None, normal(3, CHANNELS)], ids=["no_bias", "bias"])
@pytest.mark.parametrize("width", [2, 4])
def test_agrees_with_the_reference(tokens, bias, width):
    check(normal(0, 3, tokens, CHANNELS), [3, 1, 5], [2, 6, 4], [tokens, tokens - 1, 0], bias, width)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    read_slots=st.lists(st.integers(0, SLOTS - 1), min_size=3, max_size=3),
    write_slots=st.permutations(range(1, SLOTS)),
)
def test_agrees_with_the_reference_on_any_lengths_and_slots(lengths, read_slots, write_slots):
    check(normal(0, 3, 9, CHANNELS), read_slots, write_slots[:3], lengths)


@pytest.mark.parametrize("tokens", [1, 9])
def test_rows_of_length_zero_copy_their_state(tokens):
    _, state = check(normal(0, 3, tokens, CHANNELS), [3, 0, 0], [5, 0, 0], [0, 0, 0])
    np.testing.assert_array_equal(state[1, 5], make_state()[1, 3])
    np.testing.assert_array_equal(state[1, 0], make_state()[1, 0])


@pytest.mark.parametrize("tokens", [1, 9])
def test_rows_may_read_one_slot_and_write_their_own(tokens):
    check(normal(0, 3, tokens, CHANNELS), [3, 3, 4], [2, 6, 4], [tokens, tokens, tokens])


@pytest.mark.parametrize("parts", [(1, 1, 1, 1, 1), (2, 6, 1), (1, 2, 9)])
def test_continuing_from_the_state_equals_one_call(parts):
    x, state = normal(0, 1, sum(parts), CHANNELS), make_state()
    weight, slots = normal(2, CHANNELS, WIDTH), (jnp.array([3]), jnp.array([3]))
    whole, whole_state = fast(x, weight, state, 1, *slots, jnp.array([sum(parts)]))
    outs, start = [], 0
    for part in parts:
        out, state = fast(x[:, start : start + part], weight, state, 1, *slots, jnp.array([part]))
        outs.append(out)
        start += part
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, atol=1e-6)
    np.testing.assert_array_equal(state, whole_state)


@pytest.mark.parametrize("tokens", [1, 9])
def test_padding_may_hold_nan(tokens):
    lengths = [tokens, tokens // 2, 0]
    padding = np.arange(tokens) >= np.array(lengths)[:, None]
    out, state = check(normal(0, 3, tokens, CHANNELS).at[padding].set(jnp.nan), [3, 1, 4], [2, 6, 5], lengths)
    assert np.isfinite(state).all()
    assert np.isfinite(np.array(out)[~padding]).all()


@pytest.mark.parametrize("tokens", [1, 9])
def test_layer_may_be_traced_under_scan(tokens):
    x, weight, state = normal(0, 2, tokens, CHANNELS), normal(2, CHANNELS, WIDTH), make_state()
    slots = jnp.array([3, 1]), jnp.array([2, 6]), jnp.array([tokens, tokens])

    def body(state, layer):
        out, state = short_conv(x, weight, state, layer, *slots)
        return state, out

    scanned, outs = jax.jit(lambda s: jax.lax.scan(body, s, jnp.arange(LAYERS)))(state)
    for layer in range(LAYERS):
        out, state = fast(x, weight, state, layer, *slots)
        np.testing.assert_allclose(outs[layer], out, atol=1e-6)
    np.testing.assert_array_equal(scanned, state)


def test_output_and_state_keep_their_dtypes():
    x, state = normal(0, 1, 5, CHANNELS).astype(jnp.bfloat16), make_state()
    slots = jnp.array([3]), jnp.array([2]), jnp.array([5])
    out, new_state = fast(x, normal(2, CHANNELS, WIDTH), state, 0, *slots)
    assert (out.dtype, new_state.dtype) == (jnp.bfloat16, jnp.float32)


def test_gradient_equals_the_reference_s():
    arguments = normal(0, 2, 9, CHANNELS), normal(2, CHANNELS, WIDTH), make_state(), normal(3, CHANNELS)
    padding = np.arange(9) >= np.array([[9], [5]])
    weights = normal(4, 2, 9, CHANNELS)
    slots = jnp.array([3, 1]), jnp.array([2, 6]), jnp.array([9, 5])

    def loss(function, x, weight, state, bias):
        out, new_state = function(x.at[padding].set(jnp.nan), weight, state, 1, *slots, bias)
        return (weights * jnp.where(padding[..., None], 0, out)).sum() + (new_state**2).sum()

    got = jax.jit(jax.grad(functools.partial(loss, short_conv), argnums=range(4)))(*arguments)
    expected = jax.jit(jax.grad(functools.partial(loss, reference), argnums=range(4)))(*arguments)
    for g, e in zip(got, expected, strict=True):
        assert np.isfinite(g).all()
        np.testing.assert_allclose(g, e, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_donated_state_is_never_copied(batch, tokens):
    floats = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((batch, tokens, CHANNELS), (CHANNELS, WIDTH), (LAYERS, 1000, WIDTH - 1, CHANNELS))
    ]
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (batch,), (batch,), (batch,))]
    compiled = jax.jit(short_conv, donate_argnums=2).lower(*floats, *integers).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < floats[2].size * 4 / 10


def test_the_registry_records_the_choice():
    with registry.record() as recorder:
        short_conv(normal(0, 1, 2, CHANNELS), normal(2, CHANNELS, WIDTH), make_state(), 0, *jnp.array([[1], [1], [2]]))
    assert [(c.operator, c.implementation) for c in recorder.choices()] == [("short_conv", "xla")]
