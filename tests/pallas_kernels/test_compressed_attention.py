import functools

import jax
import numpy as np
import pytest

from pallas_kernels import registry
from pallas_kernels.compressed_attention import compressed_attention, pool_windows

LAYERS, SLOTS, WIDTH, HEADS, PAGE, WINDOW = 2, 7, 6, 5, 4, 9
pool = jax.jit(pool_windows)
attend = jax.jit(functools.partial(compressed_attention, scale=WIDTH**-0.5))


@pytest.fixture(autouse=True)
def small_blocks_and_tiles(monkeypatch):
    monkeypatch.setattr("pallas_kernels.paging.MIN_BLOCK_TOKENS", 2 * PAGE)
    monkeypatch.setattr("pallas_kernels.tiles.ELEMENTS", 3000)


def run(kind, function, *call):
    with registry.force(kind):
        return function(*call)


def entry_by_definition(values, gates, bias, window):
    """The softmax over all tokens that make entry `window` of one sequence; arrays [N, S, d]."""
    stride, series = bias.shape[:2]
    here = slice(window * stride, (window + 1) * stride)
    scores, rows = [gates[here, -1] + bias[:, -1]], [values[here, -1]]
    if series == 2 and window:
        before = slice((window - 1) * stride, window * stride)
        scores.append(gates[before, 0] + bias[:, 0])
        rows.append(values[before, 0])
    weights = np.exp(np.concatenate(scores))
    return (weights * np.concatenate(rows)).sum(0) / weights.sum(0)


@pytest.mark.parametrize("kind", ["reference", "xla"])
@pytest.mark.parametrize(("series", "stride"), [(1, 5), (2, 3)])
def test_entries_by_any_partition_are_those_of_the_definition(kind, series, stride):
    """Two rows of different lengths and a padded one, in calls that begin and end anywhere in a window."""
    rng = np.random.default_rng(series)
    totals = np.array([24, 19, 0])
    values, gates = rng.standard_normal((2, 3, 24, series, WIDTH)).astype(np.float32) * 2
    bias = rng.standard_normal((stride, series, WIDTH)).astype(np.float32)
    state = np.zeros((LAYERS, SLOTS, 2 * series - 1, 3, WIDTH), np.float32)
    state[:, 0] = np.nan
    starts, reads = np.zeros(3, np.int32), np.array([1, 1, 0], np.int32)
    found: list[list[np.ndarray]] = [[], [], []]
    for call, most in enumerate([7, 7, 1, 1, 1, 7, 7]):
        tokens = 7 if most > 1 else 1
        lengths = np.minimum(totals - starts, [most, most - most // 3, most]).astype(np.int32)
        steps = starts[:, None] + np.arange(tokens)
        real = (np.arange(tokens) < lengths[:, None])[..., None, None]
        new = [
            np.where(real, np.take_along_axis(x, np.minimum(steps, 23)[..., None, None], 1), np.nan)
            for x in (values, gates)
        ]
        writes = np.array([2 + call % 2, 4 + call % 2, 0], np.int32)
        entries, count, state = run(kind, pool, *new, bias, state, np.int32(1), reads, writes, starts, lengths)
        assert np.isfinite(entries[:2]).all()
        for row in range(3):
            found[row] += list(np.asarray(entries[row, : count[row]]))
        starts, reads = starts + lengths, writes
    assert (starts == totals).all()
    assert not np.asarray(state[0, 1:]).any()
    for row in range(2):
        assert len(found[row]) == totals[row] // stride
        for window, entry in enumerate(found[row]):
            expected = entry_by_definition(values[row], gates[row], bias, window)
            np.testing.assert_allclose(entry, expected, atol=1e-5)


def make_call(tokens, starts, lengths, top_k):
    """Out-of-order pages and slots, NaN wherever nothing is."""
    rng = np.random.default_rng(tokens)
    batch = len(starts)
    starts, lengths = np.asarray(starts, np.int32), np.asarray(lengths, np.int32)
    real = np.arange(tokens) < lengths[:, None]
    q, kv = rng.standard_normal((batch, tokens, HEADS, WIDTH)), rng.standard_normal((batch, tokens, WIDTH))
    q[~real], kv[~real] = np.nan, np.nan
    window = np.full((LAYERS, SLOTS, WINDOW - 1, WIDTH), np.nan)
    reads = np.where(lengths > 0, 1 + np.arange(batch), 0)
    window[:, reads] = rng.standard_normal((LAYERS, batch, WINDOW - 1, WIDTH))
    table = rng.permutation(np.arange(1, 1 + 6 * batch)).reshape(batch, 6)
    entries = np.full((LAYERS, 1 + table.size, PAGE, WIDTH), np.nan)
    chosen = np.full((batch, tokens, top_k), -1)
    for b in range(batch):
        for entry in range((starts[b] + lengths[b]) // 2):
            entries[:, table[b, entry // PAGE], entry % PAGE] = rng.standard_normal((LAYERS, WIDTH))
        for t in range(lengths[b]):
            seen = rng.permutation((starts[b] + t + 1) // 2)[:top_k]
            chosen[b, t, : len(seen)] = seen
    arrays = [q, kv, rng.standard_normal(HEADS), window, entries]
    arrays = [array.astype(np.float32) for array in arrays]
    address = [table, starts, lengths, reads, np.where(lengths > 0, 4 - np.arange(batch), 0)]
    return *arrays, chosen.astype(np.int32), np.int32(1), *(part.astype(np.int32) for part in address)


@pytest.mark.parametrize(
    ("tokens", "starts", "lengths", "top_k"),
    [(1, [0, 3, 39], [1, 1, 0], 5), (4, [30, 2, 7], [4, 3, 0], 24), (41, [0, 5], [41, 17], 7)],
)
@pytest.mark.parametrize("pooled", [True, False])
def test_attention_matches_reference_with_poison(tokens, starts, lengths, top_k, pooled):
    call = make_call(tokens, starts, lengths, top_k)
    if not pooled:
        call = (*call[:4], None, None, *call[6:])
    expected, expected_window, _ = run("reference", attend, *call)
    out, window, _ = run("xla", attend, *call)
    for b, length in enumerate(lengths):
        assert np.isfinite(expected[b, :length]).all()
        np.testing.assert_allclose(out[b, :length], expected[b, :length], atol=2e-5)
    assert np.isfinite(out[np.asarray(lengths) > 0]).all()
    np.testing.assert_array_equal(window[:, 1:], expected_window[:, 1:])


def test_attention_by_definition():
    call = make_call(3, [20], [3], 4)
    q, kv, sinks, window, entries, chosen, _, table, *_ = map(np.asarray, call)
    out, after, _ = run("xla", attend, *call)
    rows = np.concatenate([window[1, 1], kv[0]])
    np.testing.assert_array_equal(after[1, 4], rows[3:])
    for t in range(3):
        keys = rows[t : t + WINDOW]
        keys = np.concatenate([keys, [entries[1, table[0, w // PAGE], w % PAGE] for w in chosen[0, t] if w >= 0]])
        for head in range(HEADS):
            weights = np.exp(WIDTH**-0.5 * keys @ q[0, t, head])
            expected = weights @ keys / (weights.sum() + np.exp(sinks[head]))
            np.testing.assert_allclose(out[0, t, head], expected, atol=1e-5)
