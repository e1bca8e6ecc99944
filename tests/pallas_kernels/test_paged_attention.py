import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import paging, registry
from pallas_kernels.paged_attention import paged_attention

LAYERS, PAGE, WIDTH, KV_HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 8, 13, 2, 3, 10, 12
SCALE = KEY_DIM**-0.5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("pallas_kernels.paging.MIN_BLOCK_TOKENS", 3 * PAGE)
    monkeypatch.setattr("pallas_kernels.paged_attention.xla.FEW_QUERY_ROWS", 3 * KV_HEADS * GROUP)


def make_call(tokens, starts, lengths, seed=0, poison=np.nan, shared=0):
    """Arguments with out-of-order tables, poison wherever no token is, and the first `shared` pages the same in all."""
    rng = np.random.default_rng(seed)
    batch = len(starts)
    starts, lengths = np.asarray(starts, np.int32), np.asarray(lengths, np.int32)
    table = rng.permutation(np.arange(1, 1 + batch * WIDTH)).reshape(batch, WIDTH).astype(np.int32)
    table[:, :shared] = table[0, :shared]
    table[np.arange(WIDTH) >= -(-(starts + lengths) // PAGE)[:, None]] = 0

    def pages(dim):
        values = np.full((LAYERS, 1 + batch * WIDTH, PAGE, KV_HEADS * dim), poison, np.float32)
        for b, start in enumerate(starts):
            for position in range(start):
                row = rng.standard_normal((LAYERS, KV_HEADS * dim))
                values[:, table[b, position // PAGE], position % PAGE] = row
        return jnp.asarray(values)

    def rows(heads, dim):
        values = rng.standard_normal((batch, tokens, heads, dim)).astype(np.float32)
        values[np.arange(tokens) >= lengths[:, None]] = poison
        return jnp.asarray(values)

    return (
        rows(KV_HEADS * GROUP, KEY_DIM),
        rows(KV_HEADS, KEY_DIM),
        rows(KV_HEADS, VALUE_DIM),
        pages(KEY_DIM),
        pages(VALUE_DIM),
        1,
        jnp.asarray(table),
        jnp.asarray(starts),
        jnp.asarray(lengths),
    )


def by_head(rows):
    """Rows of pages as [rows, heads, dim]."""
    rows = np.stack(list(rows))
    return rows.reshape(len(rows), KV_HEADS, -1)


jitted = jax.jit(functools.partial(paged_attention, scale=SCALE), static_argnames=("max_length", "window", "soft_cap"))
SINKS = jnp.linspace(-1.5, 2.5, KV_HEADS * GROUP)


def run(kind, call, **options):
    with registry.force(kind):
        return jitted(*call[:5], jnp.int32(call[5]), *call[6:], **options)


def assert_same(call, **options):
    features = {name: value for name, value in options.items() if name != "max_length"}
    expected, got = run("reference", call, **features), run("xla", call, **options)
    assert np.isfinite(expected[0]).all()
    np.testing.assert_allclose(got[0], expected[0], atol=2e-5, rtol=0)
    for new_pages, expected_pages in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(new_pages, expected_pages)


@pytest.mark.parametrize(
    ("tokens", "starts", "lengths"),
    [
        (1, [0, 5, 40, 23], [1, 1, 0, 1]),
        (3, [0, 7, 62, 16], [3, 2, 1, 0]),
        (65, [0, 39, 8], [65, 11, 64]),
        (65, [0, 0], [0, 0]),
    ],
)
def test_matches_reference_with_poison(tokens, starts, lengths):
    assert_same(make_call(tokens, starts, lengths))
    assert_same(make_call(tokens, starts, lengths), max_length=104)


@settings(max_examples=15, deadline=None)
@given(
    data=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 5)), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
def test_any_starts_and_lengths(data, seed):
    starts, lengths = zip(*data, strict=True)
    assert_same(make_call(5, starts, lengths, seed))


def test_reference_is_softmax_attention_over_a_flat_context():
    """The definition against an independent computation, so that both implementations cannot share a mistake."""
    q, k, v, k_pages, v_pages, layer, table, starts, lengths = make_call(4, [18], [4])
    out, _, _ = run("reference", (q, k, v, k_pages, v_pages, layer, table, starts, lengths))
    past = [(int(table[0, p // PAGE]), p % PAGE) for p in range(18)]
    keys = np.concatenate([by_head(k_pages[layer, page, row] for page, row in past), k[0]])
    values = np.concatenate([by_head(v_pages[layer, page, row] for page, row in past), v[0]])
    for t in range(4):
        for head in range(KV_HEADS * GROUP):
            scores = np.exp(SCALE * keys[: 19 + t, head // GROUP] @ np.asarray(q[0, t, head]))
            expected = scores @ values[: 19 + t, head // GROUP] / scores.sum()
            np.testing.assert_allclose(out[0, t, head], expected, atol=1e-5)


def test_rows_share_pages():
    assert_same(make_call(3, [16, 19, 21], [3, 3, 2], shared=2))


def test_padded_steps_give_zero_and_leave_null_page_alone():
    call = make_call(3, [4, 9], [1, 0])
    out, k_pages, v_pages = run("xla", call)
    assert (out[0, 1:] == 0).all()
    assert (out[1] == 0).all()
    np.testing.assert_array_equal(k_pages[:, 0], call[3][:, 0])
    np.testing.assert_array_equal(v_pages[:, 0], call[4][:, 0])


def test_traced_layer_and_untouched_layers():
    call = make_call(3, [9, 30], [3, 2])
    out, k_pages, _ = run("xla", call)
    static = paged_attention(*call, scale=SCALE)
    np.testing.assert_allclose(static[0], out, atol=1e-6)
    np.testing.assert_array_equal(static[1], k_pages)
    np.testing.assert_array_equal(k_pages[0], call[3][0])


def test_chunks_give_what_one_call_gives():
    q, k, v, k_pages, v_pages, layer, table, _, _ = make_call(11, [0, 0], [11, 11])
    whole, _, _ = run("xla", (q, k, v, k_pages, v_pages, layer, table, jnp.zeros(2, int), jnp.array([11, 11])))
    parts = []
    for begin, end in ((0, 4), (4, 5), (5, 11)):
        count = jnp.full(2, end - begin)
        chunk = (q[:, begin:end], k[:, begin:end], v[:, begin:end])
        out, k_pages, v_pages = run("xla", (*chunk, k_pages, v_pages, layer, table, jnp.full(2, begin), count))
        parts.append(out)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-5)


def test_bfloat16_pages_and_queries():
    call = make_call(3, [9, 30], [3, 2])
    half = tuple(a.astype(jnp.bfloat16) if a.ndim > 2 else a for a in call[:5])
    out, k_pages, _ = run("xla", (*half, *call[5:]))
    assert out.dtype == k_pages.dtype == jnp.bfloat16
    expected, _, _ = run("reference", (*half, *call[5:]))
    np.testing.assert_allclose(out.astype(float), expected.astype(float), atol=2e-2)


def test_gradient_matches_reference_and_is_free_of_poison():
    call = make_call(5, [17, 0], [5, 3])
    weights = jax.random.normal(jax.random.key(3), (2, 5, KV_HEADS * GROUP, VALUE_DIM))

    def loss(kind, max_length, *arrays):
        with registry.force(kind):
            out, _, _ = paged_attention(*arrays, *call[5:], scale=SCALE, max_length=max_length)
        return (out * weights).sum()

    expected = jax.jit(jax.grad(functools.partial(loss, "reference", None), argnums=range(5)))(*call[:5])
    got = jax.jit(jax.grad(functools.partial(loss, "xla", 24), argnums=range(5)))(*call[:5])
    for one, other in zip(got, expected, strict=True):
        assert np.isfinite(one).all()
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_pages_stay_in_place():
    """No copy of the pages in a donated program of two layers: the loop of one must not keep them from the next."""
    call = make_call(1, [9, 30], [1, 1])

    def two_layers(q, k, v, k_pages, v_pages, table, starts, lengths):
        for layer in range(LAYERS):
            out, k_pages, v_pages = paged_attention(
                q, k, v, k_pages, v_pages, layer, table, starts, lengths, scale=SCALE
            )
            q = q.at[..., 0].add(out[..., 0])
        return q, k_pages, v_pages

    program = jax.jit(two_layers, donate_argnums=(3, 4)).lower(*call[:5], *call[6:]).compile().as_text()
    shapes = [",".join(map(str, pages.shape)) for pages in call[3:5]]
    assert all(f"f32[{shape}]" in program for shape in shapes)
    assert not [line for line in program.splitlines() if "copy(" in line and any(f"f32[{s}]" in line for s in shapes)]


def test_one_program_for_all_contexts():
    """A longer context neither recompiles nor costs a short one anything: the trip count is data."""
    compiled = jax.jit(functools.partial(paged_attention, scale=SCALE))
    for start in (0, 50, 90):
        compiled(*make_call(1, [start], [1]))
    assert compiled._cache_size() == 1


@pytest.mark.parametrize("window", [1, 11, 30])
@pytest.mark.parametrize(
    ("tokens", "starts", "lengths"),
    [(1, [0, 5, 40, 93], [1, 1, 0, 1]), (3, [0, 7, 62, 16], [3, 2, 1, 0]), (65, [0, 39, 8], [65, 11, 64])],
)
def test_window_matches_reference_with_poison(window, tokens, starts, lengths):
    call = make_call(tokens, starts, lengths)
    assert_same(call, window=window)
    assert_same(call, window=window, max_length=104)


@pytest.mark.parametrize(
    "features", [{"sinks": SINKS}, {"soft_cap": 0.7}, {"sinks": SINKS, "soft_cap": 1.3, "window": 9}]
)
@pytest.mark.parametrize("tokens", [1, 20])
def test_sinks_and_soft_cap_match_reference(features, tokens):
    assert_same(make_call(tokens, [0, 39, 8], [1, tokens, tokens // 2]), **features)


def test_reference_features_are_their_definitions():
    """Window, sink and cap against an independent computation; each one changes the output."""
    call = make_call(4, [18], [4])
    q, k, v, k_pages, v_pages, layer, table = call[:7]
    past = [(int(table[0, p // PAGE]), p % PAGE) for p in range(18)]
    keys = np.concatenate([by_head(k_pages[layer, page, row] for page, row in past), k[0]])
    values = np.concatenate([by_head(v_pages[layer, page, row] for page, row in past), v[0]])
    out, _, _ = run("reference", call, window=6, sinks=SINKS, soft_cap=0.8)
    for t in range(4):
        seen = slice(18 + t - 5, 19 + t)
        for head in range(KV_HEADS * GROUP):
            scores = np.exp(0.8 * np.tanh(SCALE * keys[seen, head // GROUP] @ np.asarray(q[0, t, head]) / 0.8))
            expected = scores @ values[seen, head // GROUP] / (scores.sum() + np.exp(float(SINKS[head])))
            np.testing.assert_allclose(out[0, t, head], expected, atol=1e-5)


def test_time_follows_the_window():
    """The trip count of the loop is the window's, not the context's, wherever the sequences are."""
    call = make_call(1, [3, 90, 41], [1, 1, 1])
    counts = []

    def count_block(*_):
        counts.append(1)

    def counting(pages, layer, page_ids, written):
        jax.debug.callback(count_block)
        return read_pages(pages, layer, page_ids, written)

    read_pages = paging.read_pages
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paging, "read_pages", counting)
        for window in (None, 2 * PAGE):
            counts.clear()
            jax.block_until_ready(paged_attention(*call, scale=SCALE, window=window))
            jax.effects_barrier()
            # Keys and values are read once a block of four pages.
            assert len(counts) == 2 * (3 if window is None else 1)


def test_window_and_sink_gradients_match_reference():
    call = make_call(5, [17, 0], [5, 3])
    weights = jax.random.normal(jax.random.key(3), (2, 5, KV_HEADS * GROUP, VALUE_DIM))

    def loss(kind, max_length, sinks, *arrays):
        with registry.force(kind):
            out, _, _ = paged_attention(
                *arrays, *call[5:], scale=SCALE, max_length=max_length, window=7, sinks=sinks, soft_cap=2.0
            )
        return (out * weights).sum()

    expected = jax.jit(jax.grad(functools.partial(loss, "reference", None), argnums=range(6)))(SINKS, *call[:5])
    got = jax.jit(jax.grad(functools.partial(loss, "xla", 24), argnums=range(6)))(SINKS, *call[:5])
    for one, other in zip(got, expected, strict=True):
        assert np.isfinite(one).all()
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("dim", [64, 80, 256])
def test_published_head_widths(dim):
    q, k, v, *pages, layer, table, starts, lengths = make_call(2, [9, 30], [2, 1])
    repeats = -(-dim // KEY_DIM)

    def widen(a):
        return jnp.tile(a, repeats)[..., :dim]

    def widen_pages(a):
        return widen(a.reshape(*a.shape[:3], KV_HEADS, -1)).reshape(*a.shape[:3], -1)

    rows = (widen(q) / repeats, widen(k), widen(v))
    assert_same((*rows, *map(widen_pages, pages), layer, table, starts, lengths), window=13, sinks=SINKS)
