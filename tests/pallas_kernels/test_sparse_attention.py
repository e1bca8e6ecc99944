import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import registry
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.sparse_attention import index_top_k, sparse_latent_attention

LAYERS, PAGE, WIDTH, HEADS, NOPE, ROPE, VALUE, RANK, INDEX_HEADS, INDEX_DIM = 2, 8, 11, 3, 5, 4, 6, 14, 9, 7
SCALE = (NOPE + ROPE) ** -0.5
choose = jax.jit(index_top_k, static_argnames=("top_k", "max_length"))
attend = jax.jit(functools.partial(sparse_latent_attention, scale=SCALE), static_argnames="max_length")
CASES = [
    (1, [0, 5, 79, 23], [1, 1, 0, 1], 10),
    (3, [17, 16, 62, 23], [3, 2, 1, 0], 5),
    (65, [0, 22, 8], [65, 11, 64], 12),
]


@pytest.fixture(autouse=True)
def small_blocks_and_tiles(monkeypatch):
    monkeypatch.setattr("pallas_kernels.paging.MIN_BLOCK_TOKENS", 2 * PAGE)
    monkeypatch.setattr("pallas_kernels.tiles.ELEMENTS", 7000)


class Case:
    """A batch with out-of-order tables and NaN wherever no token is."""

    def __init__(self, tokens, starts, lengths):
        rng = np.random.default_rng(tokens)
        batch = len(starts)
        self.starts, self.lengths = np.asarray(starts, np.int32), np.asarray(lengths, np.int32)
        self.table = rng.permutation(np.arange(1, 1 + batch * WIDTH)).reshape(batch, WIDTH).astype(np.int32)
        self.table[np.arange(WIDTH) >= -(-(self.starts + self.lengths) // PAGE)[:, None]] = 0
        self.real = np.arange(tokens) < self.lengths[:, None]
        self.seen = np.where(self.real, self.starts[:, None] + np.arange(tokens) + 1, 0).astype(np.int32)
        self.rng = rng

    def rows(self, *shape):
        values = self.rng.standard_normal((*self.real.shape, *shape)).astype(np.float32)
        values[~self.real] = np.nan
        return jnp.asarray(values)

    def pages(self, width, ends):
        pages = np.full((LAYERS, 1 + self.table.size, PAGE, width), np.nan, np.float32)
        for b, end in enumerate(ends):
            for position in range(end):
                at = self.table[b, position // PAGE], position % PAGE
                pages[:, *at] = self.rng.standard_normal((LAYERS, width))
        return jnp.asarray(pages)

    def index_call(self):
        pages = self.pages(INDEX_DIM, self.starts + self.lengths)
        q, weights = self.rows(INDEX_HEADS, INDEX_DIM), self.rows(INDEX_HEADS)
        return q, weights, pages, *map(jnp.asarray, (np.int32(1), self.table, self.seen))

    def attention_call(self, chosen):
        weights = [
            self.rng.standard_normal((HEADS, dim, RANK)).astype(np.float32) * RANK**-0.5 for dim in (NOPE, VALUE)
        ]
        new = (self.rows(HEADS, NOPE), self.rows(HEADS, ROPE), self.rows(RANK), self.rows(ROPE), *weights)
        address = map(jnp.asarray, (np.int32(1), self.table, self.starts, self.lengths))
        return *new, self.pages(RANK + ROPE, self.starts), chosen, *address


def run(kind, function, *call, **options):
    with registry.force(kind):
        return function(*call, **options)


@pytest.mark.parametrize(("tokens", "starts", "lengths", "top_k"), CASES)
def test_choice_and_attention_match_reference_with_poison(tokens, starts, lengths, top_k):
    case = Case(tokens, starts, lengths)
    index_call = case.index_call()
    expected, _ = run("reference", choose, *index_call, top_k=top_k)
    np.testing.assert_array_equal((expected >= 0).sum(-1), np.minimum(case.seen, top_k))
    call = case.attention_call(expected)
    expected_out, expected_pages = run("reference", attend, *call)
    assert np.isfinite(expected_out).all()
    assert np.abs(expected_out).max() > 0.1
    for options in ({}, {"max_length": 87}):
        chosen, pages = run("xla", choose, *index_call, top_k=top_k, **options)
        np.testing.assert_array_equal(chosen, expected)
        np.testing.assert_array_equal(pages, index_call[2])
        out, pages = run("xla", attend, *call, **options)
        np.testing.assert_allclose(out, expected_out, atol=2e-5, rtol=0)
        np.testing.assert_array_equal(pages, expected_pages)


def test_reference_chooses_by_the_equation():
    case = Case(4, [29], [4])
    call = case.index_call()
    q, weights, pages = map(np.asarray, call[:3])
    chosen, _ = run("reference", choose, *call, top_k=6)
    for t in range(4):
        keys = np.stack([pages[1, case.table[0, p // PAGE], p % PAGE] for p in range(30 + t)])
        scores = sum(weights[0, t, h] * np.maximum(keys @ q[0, t, h], 0) for h in range(INDEX_HEADS))
        np.testing.assert_array_equal(chosen[0, t], np.argsort(-scores)[:6])


def test_of_equal_scores_the_earlier_key_wins():
    case = Case(2, [70], [2])
    q, weights, *rest = case.index_call()
    for kind in ("reference", "xla"):
        chosen, _ = run(kind, choose, q, jnp.zeros_like(weights), *rest, top_k=9)
        np.testing.assert_array_equal(chosen[0], [range(9)] * 2)


@pytest.mark.parametrize("kind", ["reference", "xla"])
def test_all_positions_chosen_is_latent_attention(kind):
    case = Case(5, [30, 0], [4, 5])
    everything = np.where(np.arange(40) < case.seen[..., None], np.arange(40), -1).astype(np.int32)
    call = case.attention_call(jnp.asarray(everything))
    out, pages = run(kind, attend, *call)
    expected, expected_pages = latent_attention(*call[:7], *call[8:], scale=SCALE)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_array_equal(pages, expected_pages)


def test_one_chosen_position_is_its_value():
    case = Case(3, [41], [3])
    chosen = np.array([[[7, -1], [43, -1], [41, -1]]], np.int32)[:, [0, 2, 1]]
    call = case.attention_call(jnp.asarray(chosen))
    out, pages = run("xla", attend, *call)
    for t, position in enumerate((7, 41, 43)):
        row = pages[1, case.table[0, position // PAGE], position % PAGE, :RANK]
        np.testing.assert_allclose(out[0, t], call[5] @ row, atol=1e-5)


def test_long_chunks_are_never_whole():
    """Neither [B,T,HI,S] scores nor [B,T,K,r] rows appear in the compiled program."""
    tokens, top_k = 96, 24
    case = Case(tokens, [0, 0], [88, 60])
    index_call = case.index_call()
    for function, call, options in (
        (index_top_k, index_call, {"top_k": top_k}),
        (sparse_latent_attention, case.attention_call(np.zeros((2, tokens, top_k), np.int32)), {"scale": SCALE}),
    ):
        jitted = jax.jit(functools.partial(function, **options))
        with registry.force("xla"):
            temporary = jitted.lower(*call).compile().memory_analysis().temp_size_in_bytes
        given = sum(array.nbytes for array in jax.tree.leaves(call))
        whole = 4 * 2 * tokens * min(INDEX_HEADS * 2 * top_k, top_k * (RANK + ROPE))
        assert temporary < given + whole / 2


def test_gradient_passes_the_attention_and_not_the_choice():
    case = Case(4, [17, 0], [4, 3])
    q, weights, index_pages, *rest = case.index_call()
    call = case.attention_call(None)
    tilt = jax.random.normal(jax.random.key(3), (2, 4, HEADS, VALUE))

    def loss(arrays, index_arrays, kind):
        with registry.force(kind):
            chosen, _ = index_top_k(*index_arrays, index_pages, *rest, top_k=5, max_length=48)
            out, _ = sparse_latent_attention(*arrays, chosen, *call[8:], scale=SCALE, max_length=48)
        return (out * tilt).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    expected, _ = gradient(call[:7], (q, weights), "reference")
    got, indexer = gradient(call[:7], (q, weights), "xla")
    assert all((one == 0).all() for one in indexer)
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert np.isfinite(one).all(), index
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, atol=5e-5)
