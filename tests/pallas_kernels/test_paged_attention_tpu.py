"""The TPU kernel, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from paged_cases import PagedCase

from pallas_kernels import paged_softmax_tpu
from pallas_kernels.paged_attention import reference, tpu

STATIC = ("scale", "window", "soft_cap")
# Memory that was never written is NaN to the interpreter.
kernel = jax.jit(functools.partial(tpu.paged_attention, interpret=pltpu.InterpretParams()), static_argnames=STATIC)
expected = jax.jit(reference.paged_attention, static_argnames=STATIC)

PAGE, WIDTH = 16, 26


def make_call(tokens, starts, lengths, *, heads=6, kv_heads=2, dim=128, value_dim=None, dtype=jnp.float32, seed=0):
    case = PagedCase(starts, lengths, tokens, PAGE, WIDTH, seed=seed)
    value_dim = value_dim or dim
    new = (case.rows(heads, dim, dtype=dtype), *(case.rows(kv_heads, d, dtype=dtype) for d in (dim, value_dim)))
    return (*new, *(case.pages(kv_heads * d, dtype) for d in (dim, value_dim)), *case.numbers())


def check(call, run=kernel, atol=2e-5, **options):
    """Agrees with the reference, in pages to the bit."""
    options = {"scale": call[0].shape[-1] ** -0.5} | options
    out, *pages = run(*call, **options)
    right, *right_pages = expected(*call, **options)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(right, np.float32), atol=atol, rtol=0)
    for got, wanted in zip(pages, right_pages, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))


# Blocks are of 128 keys: before, at and after their edges, none at all, and in the third.
STARTS, ONE = [0, 127, 128, 40, 300, 111], [1, 1, 1, 0, 1, 1]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(tpu, "_BLOCK_TOKENS", 128)


def test_one_token():
    check(make_call(1, STARTS, ONE))


@pytest.mark.parametrize("window", [1, pytest.param(16, marks=pytest.mark.slow), 129])
def test_one_token_with_a_window(window):
    check(make_call(1, STARTS, ONE), window=window)


@pytest.mark.parametrize("options", [{"soft_cap": 1.3, "window": 20}, pytest.param({}, marks=pytest.mark.slow)])
def test_sinks_and_soft_cap(options):
    sinks = jnp.linspace(-1.5, 2.5, 6)
    check(make_call(1, STARTS, ONE), sinks=sinks, **options)


@pytest.mark.parametrize(
    ("dim", "value_dim", "kv_heads"),
    [
        (64, 64, 4),
        (80, 80, 3),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((192, 128, 2), (96, 64, 4), (256, 256, 1))),
    ],
)
def test_head_widths(dim, value_dim, kv_heads):
    check(make_call(1, STARTS, ONE, heads=2 * kv_heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim))


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 33])
@pytest.mark.parametrize(("tokens", "lengths"), [(5, [5, 3, 1, 0, 4, 2]), (70, [64, 70, 63, 0, 65, 1])])
def test_several_tokens(tokens, lengths, window):
    check(make_call(tokens, STARTS, lengths), window=window)


def test_blocks_of_queries_and_groups_apart(monkeypatch):
    """As prefill is cut: one group of heads a step, and 16 tokens of it."""
    monkeypatch.setattr(tpu, "_ROWS", 64)
    monkeypatch.setattr(tpu, "_FEW_ROWS", 32)
    run = jax.jit(functools.partial(tpu.paged_attention, interpret=pltpu.InterpretParams()), static_argnames=STATIC)
    call = make_call(70, [0, 127, 40], [64, 70, 1])
    check(call, run)
    check(call, run, window=33, sinks=jnp.linspace(-1.5, 2.5, 6))


def test_rows_whose_tables_do_not_fit_together(monkeypatch):
    """Six rows as kernels of four and two."""
    monkeypatch.setattr(paged_softmax_tpu, "TABLE_BYTES", 4 * 4 * WIDTH)
    run = jax.jit(functools.partial(tpu.paged_attention, interpret=pltpu.InterpretParams()), static_argnames=STATIC)
    check(make_call(1, STARTS, ONE), run)


@pytest.mark.parametrize("tokens", [1, 20])
def test_bfloat16(tokens):
    call = make_call(tokens, [0, 127, 300], [1, tokens, tokens // 2], dtype=jnp.bfloat16)
    check(call, atol=2e-2)


@pytest.mark.slow
def test_two_cores_share_the_rows_without_a_race(capfd):
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True, random_seed=4)
    run = jax.jit(functools.partial(tpu.paged_attention, interpret=params), static_argnames=STATIC)
    check(make_call(1, STARTS[:4], ONE[:4]), run)
    assert "RACE" not in capfd.readouterr().out


def test_two_runs_are_equal_to_the_bit():
    call = make_call(1, STARTS, ONE)
    first, second = (kernel(*call, scale=0.1) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])


def test_what_it_refuses():
    call = make_call(1, [3], [1])
    assert tpu.accepts(*call, scale=0.1) is None
    assert tpu.accepts(*call, max_length=64) == "max_length asks for a form that can be differentiated"
    small = (*call[:3], *(pages[:, :, :4] for pages in call[3:5]), *call[5:])
    assert tpu.accepts(*small) == "pages of 4 tokens are not a multiple of 8"
    wide = (*call[:6], jnp.zeros((1, 1 << 18), jnp.int32), *call[7:])
    assert tpu.accepts(*wide) == "262144 pages of a row are more than 512 KiB of page table"
