"""The TPU kernels of the sparse attention operators, interpreted on the CPU, against the references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from paged_cases import PagedCase

from pallas_kernels import chosen_words_tpu, registry
from pallas_kernels.latent_attention import tpu as latent_tpu
from pallas_kernels.sparse_attention import (
    INDEX_TOP_K,
    SPARSE_LATENT_ATTENTION,
    reference,
    tpu_attend,
    tpu_index,
    tpu_select,
)

HEADS, NOPE, ROPE, VALUE, RANK, PAGE, WIDTH, TOP_K = 3, 24, 20, 40, 256, 32, 26, 37
INDEX_HEADS, INDEX_DIM, INDEX_PAGE, INDEX_WIDTH = 8, 128, 64, 35
# Memory that was never written is NaN to the interpreter.
interpret = pltpu.InterpretParams()
expected = jax.jit(functools.partial(reference.sparse_latent_attention, scale=0.2))
expected_choice = jax.jit(reference.index_top_k, static_argnames="top_k")
choose = jax.jit(functools.partial(tpu_index.index_top_k, interpret=interpret), static_argnames="top_k")


def attention(**options):
    """Compiled anew, with the module's constants as they are now."""
    return jax.jit(functools.partial(tpu_attend.sparse_latent_attention, scale=0.2, interpret=interpret, **options))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks in short contexts, of few pages, each of whose copies the interpreter compiles."""
    monkeypatch.setattr(latent_tpu, "_BLOCK_TOKENS", 128)
    monkeypatch.setattr(chosen_words_tpu, "fewest_keys", lambda _: 128)
    monkeypatch.setattr(tpu_index, "_MANY_KEYS", 1024)


# Keys in the first block of 1,024, at its edges, in the third, and none.
INDEX_STARTS = [0, 5, 1023, 2200, 127, 1024]


def make_index_call(tokens, starts, lengths, dtype=jnp.float32, whole=False):
    """`whole`: of small integers, so that scores are exact and many are equal."""
    case = PagedCase(starts, lengths, tokens, INDEX_PAGE, INDEX_WIDTH)
    layer, table, starts, lengths = case.numbers()
    pages = case.pages(INDEX_DIM, dtype, written=case.starts + case.lengths)
    steps = jnp.arange(tokens)
    seen = jnp.where(steps < lengths[:, None], starts[:, None] + steps + 1, 0)
    q, weights = case.rows(INDEX_HEADS, INDEX_DIM, dtype=dtype), case.rows(INDEX_HEADS)
    if whole:
        q, weights, pages = jnp.round(q * 0.7), jnp.round(weights), jnp.round(pages * 0.3)
    return q, weights, pages, layer, table, seen


def check_choice(call, top_k, run=choose):
    chosen, pages = run(*call, top_k=top_k)
    right, _ = expected_choice(*call, top_k=top_k)
    last = np.iinfo(np.int32).max
    ascending = np.sort(np.where(right < 0, last, right), axis=-1)
    np.testing.assert_array_equal(chosen, np.where(ascending == last, -1, ascending))
    assert pages is call[2] or np.array_equal(pages, call[2], equal_nan=True)


@pytest.mark.parametrize(("tokens", "lengths"), [(1, [1, 1, 1, 1, 0, 1]), (5, [5, 3, 1, 0, 4, 2])])
def test_the_indexer_chooses_what_the_reference_does(tokens, lengths):
    for whole in (False, True):
        check_choice(make_index_call(tokens, INDEX_STARTS, lengths, whole=whole), TOP_K)


def test_the_indexer_gives_all_where_there_are_fewer():
    """More places than keys for some, filled 2,048 at a time; and queries whose heads are not taken first."""
    check_choice(make_index_call(3, [700, 2100], [3, 1], whole=True), 2048)


def test_of_equal_scores_the_earlier_key_wins():
    q, weights, *rest = make_index_call(1, INDEX_STARTS, [1] * 6)
    chosen, _ = choose(q, -0.0 * weights, *rest, top_k=TOP_K)
    for row, seen in zip(np.asarray(chosen[:, 0]), [start + 1 for start in INDEX_STARTS], strict=True):
        np.testing.assert_array_equal(row, np.where(np.arange(TOP_K) < seen, np.arange(TOP_K), -1))


def test_the_indexer_in_bfloat16_and_page_tables_of_several_kernels(monkeypatch):
    monkeypatch.setattr("pallas_kernels.paged_fetch_tpu.TABLE_BYTES", 2 * 4 * INDEX_WIDTH)
    run = jax.jit(functools.partial(tpu_index.index_top_k, interpret=interpret), static_argnames="top_k")
    check_choice(make_index_call(1, [130, 5, 40], [1, 0, 1], jnp.bfloat16, whole=True), TOP_K, run)


def test_scores_are_ordered_as_integers():
    scores = jnp.asarray([-np.inf, -3e38, -2.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 1.0000001, np.inf], jnp.float32)
    keys = np.asarray(tpu_select.ordered(scores))
    assert keys[4] == keys[5]
    assert (np.diff(keys) > 0).sum() == len(keys) - 2
    assert keys.min() > tpu_select.UNSEEN


def test_selection_from_several_stretches_of_rows():
    """Of 384 rows of 128, in places of 512: with ties over stretches, none, and fewer than wanted."""
    rng, top_k, rows = np.random.default_rng(0), 700, 300
    keys = np.full((4, 384, 128), tpu_select.UNSEEN, np.int32)
    keys[0, :rows] = rng.integers(-3, 3, (rows, 128))
    keys[1, :rows] = rng.permutation(rows * 128).reshape(rows, 128) - 20000
    keys[2, 130:rows, ::37] = -5
    keys[3, 5, 3] = np.iinfo(np.int32).max

    def kernel(keys, out, least, last):
        least[...], last[...] = tpu_select.limits(keys, jnp.int32(rows), top_k)
        for token in range(4):
            tpu_select.compact(keys, jnp.int32(rows), least, last, token, out)

    limit = pltpu.VMEM((4, 1, 128), jnp.int32)
    out = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((4, 8, 128), jnp.int32), scratch_shapes=[limit, limit],
        interpret=interpret,
    )(keys)  # fmt: skip
    for own, found in zip(keys.reshape(4, -1), np.asarray(out).reshape(4, -1), strict=True):
        best = np.argsort(-own.astype(np.int64), kind="stable")[:top_k]
        best = np.sort(best[own[best] > tpu_select.UNSEEN])
        np.testing.assert_array_equal(found, np.pad(best, (0, 1024 - len(best)), constant_values=-1))


STARTS, ONE, FEW = [0, 127, 128, 40, 700, 111], [1, 1, 1, 0, 1, 1], [5, 3, 1, 0, 4, 2]


def make_call(tokens, starts, lengths, dtype=jnp.float32, rope=ROPE, nope=NOPE, value=VALUE):
    """Choices in any order, with -1 at any place, and anything at padded steps."""
    case = PagedCase(starts, lengths, tokens, PAGE, WIDTH)
    rows = functools.partial(case.rows, dtype=dtype)
    weights = (jnp.asarray(case.rng.standard_normal((HEADS, dim, RANK)) * RANK**-0.5, dtype) for dim in (nope, value))
    chosen = np.full((case.batch, tokens, TOP_K), 3, np.int32)
    for b in range(case.batch):
        for t in range(lengths[b]):
            some = case.rng.permutation(starts[b] + t + 1)[: TOP_K - 5]
            chosen[b, t] = case.rng.permutation(np.pad(some, (0, TOP_K - len(some)), constant_values=-1))
    return (
        rows(HEADS, nope), rows(HEADS, rope), rows(RANK), rows(rope), *weights,
        case.pages(RANK + rope, dtype), jnp.asarray(chosen), *case.numbers(),
    )  # fmt: skip


def check(call, run, atol=2e-5):
    """Agrees with the reference, in pages to the bit."""
    (out, pages), (right, right_pages) = run(*call), expected(*call)
    assert np.abs(np.asarray(right, np.float32)).max() > 0.1
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(right, np.float32), atol=atol, rtol=0)
    np.testing.assert_array_equal(np.asarray(pages, np.float32), np.asarray(right_pages, np.float32))
    return out


@pytest.mark.parametrize(
    ("tokens", "lengths", "gathered"),
    [(1, ONE, False), (1, ONE, True), (5, FEW, True), pytest.param(5, FEW, False, marks=pytest.mark.slow)],
)
def test_a_few_queries(tokens, lengths, gathered, monkeypatch):
    monkeypatch.setattr(tpu_attend, "gathers", lambda *_: gathered)
    call, run = make_call(tokens, STARTS, lengths), attention()
    np.testing.assert_array_equal(check(call, run), run(*call)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("page", "gathered"), [(8, True), (24, False)])
def test_pages_of_other_sizes(page, gathered, monkeypatch):
    """Of one group of rows; and of three, which is no power of two."""
    monkeypatch.setattr(tpu_attend, "gathers", lambda *_: gathered)
    monkeypatch.setattr(f"{__name__}.PAGE", page)
    check(make_call(5, [0, 127, 40], [5, 3, 1]), attention())


def test_a_chunk_behind_a_prefix():
    check(make_call(70, [0, 127, 40, 700], [64, 70, 1, 0]), attention())


def test_expanded_latents(monkeypatch):
    monkeypatch.setattr(latent_tpu, "expansion_pays", lambda *_: True)
    monkeypatch.setattr(latent_tpu, "_ROWS", 32)
    check(make_call(70, [0, 127, 300], [64, 70, 0], rope=64, nope=128, value=128), attention())


@pytest.mark.parametrize("gathered", [pytest.param(False, marks=pytest.mark.slow), True])
def test_bfloat16(gathered, monkeypatch):
    """Queries and sums in latent space are rounded to bfloat16, as xla.py's are."""
    monkeypatch.setattr(tpu_attend, "gathers", lambda *_: gathered)
    check(make_call(2, [0, 127, 300], [1, 2, 1], jnp.bfloat16), attention(), atol=3e-2)


def test_words_have_a_bit_for_each_choice():
    """32 bits of 16 rows, of which attention's tests have no case; and of positions up to the last of two words."""
    rng, tokens, length, reach = np.random.default_rng(0), 512, 500, 4096
    chosen = np.full((1, length, 70), -1, np.int32)
    for t in range(length):
        chosen[0, t, : t % 70] = reach - 1 - rng.permutation(reach)[: t % 70]
    words = chosen_words_tpu.pack(jnp.asarray(chosen), tokens, reach, interpret)
    assert words.shape == (1, 1, 16 * reach // 128, 128)
    visible = np.asarray(chosen_words_tpu.unpack(words[0], 0, tokens, 2 * tokens))
    assert not visible[length:tokens].any()
    for row in (*range(length), *range(tokens, tokens + length)):
        own = chosen[0, row % tokens]
        np.testing.assert_array_equal(np.flatnonzero(visible[row]), np.sort(own[own >= 0]))


def test_groups_of_rows_are_those_that_hold_a_chosen_one():
    chosen = jnp.asarray([[[70, -1, 3, 17], [19, 70, 2, 71]]])
    groups, own, ends = tpu_attend.gathered(chosen, 10, 8)
    np.testing.assert_array_equal(groups[0, :3], [0, 2, 8])
    assert groups.shape == (1, 8)
    # Rows 2 and 3 of the first group, 1 and 3 of the second, 6 and 7 of the last.
    np.testing.assert_array_equal(np.sort(own[0, 0])[-3:], [3, 9, 22])
    np.testing.assert_array_equal(np.sort(own[0, 1])[-4:], [2, 11, 22, 23])
    assert ends[0] == 24


@pytest.mark.slow
def test_two_cores_share_the_rows_without_a_race(monkeypatch, capfd):
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True, random_seed=4)
    monkeypatch.setattr(tpu_attend, "gathers", lambda *_: True)
    run = jax.jit(functools.partial(tpu_index.index_top_k, interpret=params), static_argnames="top_k")
    check_choice(make_index_call(1, [5, 1100], [1, 1]), TOP_K, run)
    run = jax.jit(functools.partial(tpu_attend.sparse_latent_attention, scale=0.2, interpret=params))
    check(make_call(2, [0, 300], [1, 2]), run)
    assert "RACE" not in capfd.readouterr().out


def test_what_gets_gathered():
    assert tpu_attend.gathers(1, 2048, 64, 2048, 16)
    assert tpu_attend.gathers(4, 2048, 64, 2048, 16)
    assert not tpu_attend.gathers(1, 2048, 64, 128, 16), "a short context"
    assert not tpu_attend.gathers(16, 2048, 64, 1 << 14, 16), "many queries"
    assert not tpu_attend.gathers(1, 2048, 64, 1 << 17, 16), "tables that do not fit"
    assert not tpu_attend.gathers(1, 2048, 48, 4096, 16), "three groups a page"


def test_what_they_refuse():
    call, index = make_call(1, [3], [1]), make_index_call(1, [3], [1])
    with registry.target("tpu"):
        assert registry.choose(SPARSE_LATENT_ATTENTION, *call, scale=0.2) is tpu_attend.sparse_latent_attention
        assert registry.choose(INDEX_TOP_K, *index, top_k=3) is tpu_index.index_top_k
    narrow = (*call[:2], call[2][..., :200], *call[3:])
    assert tpu_attend.accepts(*narrow, scale=0.2) == "a latent of 200 is not a multiple of 128"
    small = (*call[:6], call[6][:, :, :4], *call[7:])
    assert tpu_attend.accepts(*small, scale=0.2) == "pages of 4 tokens are not a multiple of 8"
    few = index[0][:, :, :4], index[1][:, :, :4], *index[2:]
    assert tpu_index.accepts(*few, top_k=3) == "4 index heads are not a multiple of 8"
    short = index[0][..., :64], *index[1:]
    assert tpu_index.accepts(*short, top_k=3) == "index head_dim 64 is not a multiple of 128"
    long = *index[:4], jnp.zeros((1, 1 << 17), jnp.int32), index[5]
    assert tpu_index.accepts(*long, top_k=3) == "scores of 8388608 positions are more than 16 MiB"
    assert tpu_index.accepts(*index, top_k=3, max_length=9) == "max_length asks for a form that can be differentiated"
