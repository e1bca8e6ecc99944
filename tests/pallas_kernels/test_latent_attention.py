import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import registry
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.latent_attention.xla import expansion_pays

LAYERS, PAGE, WIDTH, HEADS, NOPE, ROPE, VALUE, RANK = 2, 8, 11, 3, 5, 4, 6, 14
SCALE = (NOPE + ROPE) ** -0.5
ARRAYS = 7
jitted = jax.jit(functools.partial(latent_attention, scale=SCALE), static_argnames="max_length")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("pallas_kernels.paging.MIN_BLOCK_TOKENS", 2 * PAGE)


def make_call(tokens, starts, lengths, shared=0):
    """Arguments with out-of-order tables, NaN wherever no token is, and the first `shared` pages the same in all."""
    rng = np.random.default_rng(tokens)
    batch = len(starts)
    starts, lengths = np.asarray(starts, np.int32), np.asarray(lengths, np.int32)
    table = rng.permutation(np.arange(1, 1 + batch * WIDTH)).reshape(batch, WIDTH).astype(np.int32)
    table[:, :shared] = table[0, :shared]
    table[np.arange(WIDTH) >= -(-(starts + lengths) // PAGE)[:, None]] = 0
    pages = np.full((LAYERS, 1 + batch * WIDTH, PAGE, RANK + ROPE), np.nan, np.float32)
    for b, start in enumerate(starts):
        for position in range(start):
            pages[:, table[b, position // PAGE], position % PAGE] = rng.standard_normal((LAYERS, RANK + ROPE))

    def rows(*shape):
        values = rng.standard_normal((batch, tokens, *shape)).astype(np.float32)
        values[np.arange(tokens) >= lengths[:, None]] = np.nan
        return values

    weights = [rng.standard_normal((HEADS, dim, RANK)).astype(np.float32) * RANK**-0.5 for dim in (NOPE, VALUE)]
    arrays = (rows(HEADS, NOPE), rows(HEADS, ROPE), rows(RANK), rows(ROPE), *weights, pages)
    return tuple(map(jnp.asarray, (*arrays, np.int32(1), table, starts, lengths)))


def run(kind, call, **options):
    with registry.force(kind):
        return jitted(*call, **options)


@pytest.mark.parametrize(
    ("tokens", "starts", "lengths", "shared"),
    [
        (1, [0, 5, 40, 23], [1, 1, 0, 1], 0),
        (3, [17, 16, 62, 23], [3, 2, 1, 0], 2),
        (65, [0, 22, 8], [65, 11, 64], 0),
    ],
)
def test_matches_reference_with_poison(tokens, starts, lengths, shared):
    call = make_call(tokens, starts, lengths, shared)
    expected, expected_pages = run("reference", call)
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0.1
    for options in ({}, {"max_length": 87}):
        out, pages = run("xla", call, **options)
        np.testing.assert_allclose(out, expected, atol=2e-5, rtol=0)
        np.testing.assert_array_equal(pages, expected_pages)


def test_form_is_chosen_by_operation_count():
    assert not expansion_pays(1, 128, 128, 512)
    assert not expansion_pays(170, 128, 128, 512)
    assert expansion_pays(171, 128, 128, 512)
    assert not expansion_pays(100_000, 64, 64, 64)


def test_both_forms_are_exercised_above():
    forms = {tokens: expansion_pays(tokens, NOPE, VALUE, RANK) for tokens in (1, 3, 65)}
    assert forms == {1: False, 3: False, 65: True}


def test_reference_is_per_head_attention_over_a_flat_context():
    call = make_call(4, [18], [4])
    q_nope, q_rope, latent, k_rope, w_k, w_v, pages, layer, table, _, _ = map(np.asarray, call)
    out, _ = run("reference", call)
    past = np.stack([pages[layer, table[0, p // PAGE], p % PAGE] for p in range(18)])
    rows = np.concatenate([past, np.concatenate([latent[0], k_rope[0]], axis=-1)])
    for t in range(4):
        seen = rows[: 19 + t]
        for head in range(HEADS):
            keys = seen[:, :RANK] @ w_k[head].T
            scores = np.exp(SCALE * (keys @ q_nope[0, t, head] + seen[:, RANK:] @ q_rope[0, t, head]))
            expected = (scores / scores.sum()) @ (seen[:, :RANK] @ w_v[head].T)
            np.testing.assert_allclose(out[0, t, head], expected, atol=1e-5)


def test_static_layer_leaves_the_others_alone():
    call = make_call(3, [9, 30], [3, 2])
    out, pages = run("xla", call)
    static, _ = latent_attention(*call[:ARRAYS], 1, *call[8:], scale=SCALE)
    np.testing.assert_allclose(static, out, atol=1e-6)
    np.testing.assert_array_equal(pages[0], call[6][0])
    np.testing.assert_array_equal(pages[:, 0], call[6][:, 0])
    assert (out[1, 2:] == 0).all()


@pytest.mark.parametrize("tokens", [5, 30])
def test_gradient_matches_reference_and_is_free_of_poison(tokens):
    call = make_call(tokens, [17, 0], [tokens, 3])
    weights = jax.random.normal(jax.random.key(3), (2, tokens, HEADS, VALUE))

    def loss(arrays, kind, max_length):
        with registry.force(kind):
            out, _ = latent_attention(*arrays, *call[ARRAYS:], scale=SCALE, max_length=max_length)
        return (out * weights).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    expected, got = gradient(call[:ARRAYS], "reference", None), gradient(call[:ARRAYS], "xla", 48)
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert np.isfinite(one).all(), index
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, atol=5e-5)
