"""The GPU kernels of the sparse attention operators, interpreted on the CPU, against the references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_cases import PagedCase

from pallas_kernels.sparse_attention import gpu, reference

HEADS, NOPE, ROPE, VALUE, RANK, PAGE, WIDTH = 3, 24, 16, 40, 64, 16, 40
INDEX_HEADS, INDEX_DIM, TOP_K = 32, 16, 37
SCALE = (NOPE + ROPE) ** -0.5

attend = jax.jit(functools.partial(gpu.sparse_latent_attention, scale=SCALE, interpret=True))
expected = jax.jit(functools.partial(reference.sparse_latent_attention, scale=SCALE))
choose = jax.jit(functools.partial(gpu.index_top_k, interpret=True), static_argnames=("top_k", "max_length"))
expected_choice = jax.jit(reference.index_top_k, static_argnames="top_k")

SHAPES = [
    (1, [0, 5, 31, 600, 23], [1, 1, 1, 1, 0]),
    (18, [0, 39, 8, 130], [18, 11, 17, 0]),
]


def make_index_call(tokens, starts, lengths, dtype=jnp.float32):
    case = PagedCase(starts, lengths, tokens, PAGE, WIDTH)
    layer, table, starts, lengths = case.numbers()
    pages = case.pages(INDEX_DIM, dtype, written=case.starts + case.lengths)
    steps = jnp.arange(tokens)
    seen = jnp.where(steps < lengths[:, None], starts[:, None] + steps + 1, 0)
    return case.rows(INDEX_HEADS, INDEX_DIM, dtype=dtype), case.rows(INDEX_HEADS), pages, layer, table, seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("top_k", [TOP_K, 2048])
def test_the_indexer_chooses_what_the_reference_does(shape, top_k):
    call = make_index_call(*shape)
    chosen, pages = choose(*call, top_k=top_k)
    right, _ = expected_choice(*call, top_k=top_k)
    assert chosen.shape == right.shape
    np.testing.assert_array_equal(chosen, right)
    np.testing.assert_array_equal(pages, call[2])


def test_the_indexer_up_to_a_length():
    """Fewer positions than are asked for: the rest is -1."""
    call = make_index_call(18, [0, 12], [18, 11])
    chosen, _ = choose(*call, top_k=TOP_K, max_length=30)
    np.testing.assert_array_equal(chosen, expected_choice(*call, top_k=TOP_K)[0])


def test_the_indexer_takes_queries_some_at_a_time(monkeypatch):
    call = make_index_call(18, [0, 39], [18, 11])
    monkeypatch.setattr(gpu, "_SCORES", 7 * 2 * WIDTH * PAGE)
    chosen, _ = gpu.index_top_k(*call, top_k=TOP_K, interpret=True)
    np.testing.assert_array_equal(chosen, expected_choice(*call, top_k=TOP_K)[0])


def make_call(tokens, starts, lengths, dtype=jnp.float32):
    case = PagedCase(starts, lengths, tokens, PAGE, WIDTH)
    rows = functools.partial(case.rows, dtype=dtype)
    w_k, w_v = (jnp.asarray(case.rng.standard_normal((HEADS, dim, RANK)) * RANK**-0.5, dtype) for dim in (NOPE, VALUE))
    chosen = np.full((case.batch, tokens, TOP_K), -1, np.int32)
    for b in range(case.batch):
        for t in range(lengths[b]):
            some = case.rng.permutation(starts[b] + t + 1)[:TOP_K]
            chosen[b, t, : len(some)] = some
    return (
        rows(HEADS, NOPE), rows(HEADS, ROPE), rows(RANK), rows(ROPE), w_k, w_v,
        case.pages(RANK + ROPE, dtype), jnp.asarray(chosen), *case.numbers(),
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_agrees_with_the_reference(shape):
    call = make_call(*shape)
    got, right = attend(*call), expected(*call)
    assert np.abs(right[0]).max() > 0.1
    np.testing.assert_allclose(got[0], right[0], atol=2e-5, rtol=0)
    np.testing.assert_array_equal(got[1], right[1])
    np.testing.assert_array_equal(attend(*call)[0], got[0])


def test_attention_in_bfloat16_is_as_good_as_bfloat16():
    call = make_call(*SHAPES[1], jnp.bfloat16)
    got = attend(*call)[0].astype(jnp.float32)
    right = expected(*(x.astype(jnp.float32) for x in call[:7]), *call[7:])[0]
    error = np.sqrt(np.square(got - right).mean() / np.square(right).mean())
    assert 1e-5 < error < 2**-6


def test_what_they_refuse():
    call, index = make_call(1, [3], [1]), make_index_call(1, [3], [1])
    assert gpu.accepts(*call, scale=1) is None
    assert gpu.accepts(*call, scale=1, max_length=9) == "max_length asks for a form with a derivative"
    assert gpu.accepts_index(*index, top_k=3) is None
    narrow = index[0][:, :, :24], index[1][:, :, :24], *index[2:]
    assert gpu.accepts_index(*narrow, top_k=3) == "index heads 24 is not 16, 32, 64 or 128"
