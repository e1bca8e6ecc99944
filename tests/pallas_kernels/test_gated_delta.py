import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import registry
from pallas_kernels.gated_delta import gated_delta

KINDS = ["per_head", "per_channel"]
# Most tests share two shapes, three rows of 1 or 70 tokens, since compiling is most of their time.
TOKENS = 70
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, LAYERS, SLOTS = 2, 6, 24, 40, 2, 7

fast = jax.jit(gated_delta)


@jax.jit
def reference(*arguments):
    with registry.force("reference"):
        return gated_delta(*arguments)


def make_inputs(kind, batch=3, tokens=TOKENS, seed=0, decay_scale=1.0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    heads = (VALUE_HEADS,) if kind == "per_head" else (VALUE_HEADS, KEY_DIM)
    return {
        "q": normal(batch, tokens, KEY_HEADS, KEY_DIM),
        "k": normal(batch, tokens, KEY_HEADS, KEY_DIM),
        "v": normal(batch, tokens, VALUE_HEADS, VALUE_DIM),
        "log_decay": -decay_scale * jnp.exp(2 * normal(batch, tokens, *heads)),
        "beta": jax.nn.sigmoid(normal(batch, tokens, VALUE_HEADS)),
    }


def make_state(seed=1):
    shape = (LAYERS, SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def check(inputs, read_slots, write_slots, lengths, state=None, layer=1, atol=3e-6):
    """Both implementations agree on valid outputs and on the whole state array; returns the fast one's result."""
    state = make_state() if state is None else state
    arguments = (*inputs.values(), state, layer, *map(jnp.array, (read_slots, write_slots, lengths)))
    out, new_state = fast(*arguments)
    expected, expected_state = reference(*arguments)
    valid = np.arange(out.shape[1]) < np.array(lengths)[:, None]
    np.testing.assert_allclose(np.array(out)[valid], np.array(expected)[valid], atol=atol, rtol=1e-5)
    np.testing.assert_allclose(new_state, expected_state, atol=atol, rtol=1e-5)
    untouched = np.ones(SLOTS, bool)
    untouched[list(write_slots)] = False
    np.testing.assert_array_equal(new_state[layer][untouched], state[layer][untouched])
    np.testing.assert_array_equal(new_state[1 - layer], state[1 - layer])
    return out, new_state


def test_the_reference_is_the_equation():
    inputs, state = make_inputs("per_channel", 1, 3), make_state()
    out, new_state = reference(*inputs.values(), state, 0, jnp.array([4]), jnp.array([2]), jnp.array([3]))
    q, k, v, log_decay, beta = (np.array(x[0], np.float64) for x in inputs.values())
    head, key_head = 4, 1  # three value heads a key head
    S = np.array(state[0, 4, head], np.float64)
    for t in range(3):
        query = q[t, key_head] / np.sqrt((q[t, key_head] ** 2).sum() + 1e-6) / np.sqrt(KEY_DIM)
        key = k[t, key_head] / np.sqrt((k[t, key_head] ** 2).sum() + 1e-6)
        S = np.exp(log_decay[t, head])[:, None] * S
        S = S + np.outer(key, beta[t, head] * (v[t, head] - S.T @ key))
        np.testing.assert_allclose(out[0, t, head], S.T @ query, atol=1e-6)
    np.testing.assert_allclose(new_state[0, 2, head], S, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_agrees_with_the_reference(kind, tokens):
    lengths = [tokens, max(tokens - 3, 0), 0]
    check(make_inputs(kind, 3, tokens), [3, 1, 5], [2, 6, 4], lengths)


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(0, TOKENS), min_size=3, max_size=3),
    read_slots=st.lists(st.integers(0, SLOTS - 1), min_size=3, max_size=3),
    write_slots=st.permutations(range(1, SLOTS)),
    decay_scale=st.sampled_from([1e-4, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_agrees_with_the_reference_on_any_lengths_and_slots(kind, lengths, read_slots, write_slots, decay_scale, seed):
    inputs = make_inputs(kind, seed=seed, decay_scale=decay_scale)
    check(inputs, read_slots, write_slots[:3], lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_rows_of_length_zero_copy_their_state(kind, tokens):
    _, state = check(make_inputs(kind, 3, tokens), [3, 0, 4], [5, 0, 1], [0, 0, tokens])
    np.testing.assert_array_equal(state[1, 5], make_state()[1, 3])
    np.testing.assert_array_equal(state[1, 0], make_state()[1, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_padding_rows_share_the_null_slot(kind, tokens):
    check(make_inputs(kind, 3, tokens), [0, 3, 0], [0, 3, 0], [0, tokens, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_rows_may_read_one_slot_and_write_their_own(kind, tokens):
    check(make_inputs(kind, 3, tokens), [3, 3, 4], [2, 6, 4], [tokens, tokens, tokens])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [(1, 1, 1), (70, 1, 5), (3, 64, 9)])
def test_continuing_from_the_state_equals_one_call(kind, parts):
    """Pieces are padded to 1 or 70 tokens; each reads the slot that the one before it wrote."""
    inputs, state = make_inputs(kind, tokens=sum(parts)), make_state()
    first, last = jnp.array([3, 1, 5]), jnp.array([4, 2, 6])
    lengths = jnp.full(3, sum(parts))
    whole, whole_state = fast(*inputs.values(), state, 1, first, last, lengths)
    outs, start, slots = [], 0, first
    for part in parts:
        size = 1 if part == 1 else TOKENS
        piece = [x[:, start : start + part] for x in inputs.values()]
        piece = [jnp.pad(x, [(0, 0), (0, size - part), *[(0, 0)] * (x.ndim - 2)]) for x in piece]
        out, state = fast(*piece, state, 1, slots, last, jnp.full(3, part))
        outs.append(out[:, :part])
        start, slots = start + part, last
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, atol=3e-6)
    np.testing.assert_allclose(state[1, last], whole_state[1, last], atol=3e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -30.0, -1000.0])
def test_extreme_decays(kind, log_decay):
    inputs = make_inputs(kind)
    inputs["log_decay"] = jnp.full_like(inputs["log_decay"], log_decay)
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 63, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_weak_decay_after_strong_decay_keeps_its_precision(kind):
    """A difference of running sums near -900 would have only four digits left."""
    inputs = make_inputs(kind, decay_scale=0.01)
    inputs["log_decay"] = inputs["log_decay"].at[:, :30].set(-30.0)
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS] * 3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_channels_may_decay_very_differently(kind):
    inputs = make_inputs(kind)
    some = np.random.default_rng(5).random(inputs["log_decay"].shape) < 0.5
    inputs["log_decay"] = jnp.asarray(np.where(some, -30.0, -1e-5), jnp.float32)
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS] * 3)


@pytest.mark.parametrize("kind", KINDS)
def test_identical_keys_without_decay(kind):
    """The system's inverse is then the hardest: its Neumann series has terms up to C(31, 15)."""
    inputs = make_inputs(kind)
    inputs["k"] = jnp.broadcast_to(inputs["k"][:, :1], inputs["k"].shape)
    inputs["log_decay"] = jnp.zeros_like(inputs["log_decay"])
    inputs["beta"] = jnp.ones_like(inputs["beta"])
    check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS] * 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_padding_may_hold_nan(kind, tokens):
    inputs, lengths = make_inputs(kind, 3, tokens), [tokens, tokens // 2, 0]
    padding = np.arange(tokens) >= np.array(lengths)[:, None]
    inputs = {name: x.at[padding].set(jnp.nan) for name, x in inputs.items()}
    out, state = check(inputs, [3, 1, 4], [2, 6, 5], lengths)
    assert np.isfinite(state).all()
    assert np.isfinite(np.array(out)[~padding]).all()


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_a_poisoned_slot_reaches_only_its_readers(tokens):
    state = make_state().at[:, 5].set(jnp.nan)
    inputs = make_inputs("per_channel", 3, tokens)
    out, new_state = fast(*inputs.values(), state, 1, jnp.array([5, 1, 2]), jnp.array([3, 1, 5]), jnp.full(3, tokens))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()
    assert np.isfinite(new_state[1, jnp.array([1, 5])]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_layer_may_be_traced_under_scan(kind, tokens):
    inputs, state = make_inputs(kind, 3, tokens), make_state()
    slots = jnp.array([3, 1, 5]), jnp.array([2, 6, 4]), jnp.full(3, tokens)

    def body(state, layer):
        out, state = gated_delta(*inputs.values(), state, layer, *slots)
        return state, out

    scanned, outs = jax.jit(lambda s: jax.lax.scan(body, s, jnp.arange(LAYERS)))(state)
    for layer in range(LAYERS):
        out, state = fast(*inputs.values(), state, layer, *slots)
        np.testing.assert_allclose(outs[layer], out, atol=1e-6)
    np.testing.assert_allclose(scanned, state, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_inputs_are_computed_in_float32(kind):
    inputs = {name: x.astype(jnp.bfloat16) for name, x in make_inputs(kind).items()}
    out, state = check(inputs, [3, 1, 5], [2, 6, 4], [TOKENS, 60, 0])
    assert out.dtype == state.dtype == jnp.float32


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_state_keeps_its_dtype(tokens):
    inputs = make_inputs("per_head", 1, tokens)
    state = make_state().astype(jnp.bfloat16)
    arguments = (*inputs.values(), state, 0, jnp.array([3]), jnp.array([2]), jnp.array([tokens]))
    out, new_state = fast(*arguments)
    expected, expected_state = reference(*arguments)
    assert new_state.dtype == expected_state.dtype == jnp.bfloat16
    np.testing.assert_allclose(out, expected, atol=3e-6)
    np.testing.assert_allclose(new_state.astype(jnp.float32), expected_state.astype(jnp.float32), atol=1e-5, rtol=0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay_scale", [1.0, 30.0])
def test_gradient_equals_the_reference_s(kind, decay_scale):
    inputs, state = make_inputs(kind, 2, 37, decay_scale=decay_scale), make_state()
    padding = np.arange(37) >= np.array([[37], [20]])
    values = [x.at[padding].set(jnp.nan) for x in inputs.values()]
    weights = jnp.asarray(np.random.default_rng(3).standard_normal((2, 37, VALUE_HEADS, VALUE_DIM)), jnp.float32)
    slots = jnp.array([3, 1]), jnp.array([2, 6]), jnp.array([37, 20])

    def loss(function, values, state):
        out, new_state = function(*values, state, 1, *slots)
        return (weights * jnp.where(padding[..., None, None], 0, out)).sum() + (new_state**2).sum()

    got = jax.jit(jax.grad(functools.partial(loss, gated_delta), argnums=(0, 1)))(values, state)
    expected = jax.jit(jax.grad(functools.partial(loss, reference), argnums=(0, 1)))(values, state)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(g).all()
        np.testing.assert_allclose(g, e, atol=2e-5 * float(jnp.abs(e).max()))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_the_donated_state_is_never_copied(batch, tokens):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make_inputs("per_head", batch, tokens).values()]
    state = jax.ShapeDtypeStruct((LAYERS, 1000, VALUE_HEADS, KEY_DIM, VALUE_DIM), jnp.float32)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (batch,), (batch,), (batch,))]
    compiled = jax.jit(gated_delta, donate_argnums=5).lower(*shapes, state, *integers).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < state.size * 4 / 10


def test_the_registry_records_the_choice():
    inputs = make_inputs("per_head", 1, 2)
    with registry.record() as recorder:
        gated_delta(*inputs.values(), make_state(), 0, jnp.array([1]), jnp.array([1]), jnp.array([2]))
    assert [(c.operator, c.implementation) for c in recorder.choices()] == [("gated_delta", "xla")]
