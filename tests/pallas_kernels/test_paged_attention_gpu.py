"""The GPU kernel of `paged_attention`, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_cases import PagedCase

from pallas_kernels.paged_attention import gpu, reference

KV_HEADS, GROUP, DIM, VALUE_DIM, PAGE, WIDTH = 2, 3, 32, 64, 16, 40
STATIC = ("window", "soft_cap")
SINKS = jnp.linspace(-1.5, 2.5, KV_HEADS * GROUP)

kernel = jax.jit(functools.partial(gpu.paged_attention, scale=0.2, interpret=True), static_argnames=STATIC)
expected = jax.jit(functools.partial(reference.paged_attention, scale=0.2), static_argnames=STATIC)


def make_call(tokens, starts, lengths, dtype=jnp.float32, kv_heads=KV_HEADS, dim=DIM, page=PAGE):
    case = PagedCase(starts, lengths, tokens, page, WIDTH)
    rows = functools.partial(case.rows, dtype=dtype)
    return (
        rows(kv_heads * GROUP, dim), rows(kv_heads, dim), rows(kv_heads, VALUE_DIM),
        case.pages(kv_heads * dim, dtype), case.pages(kv_heads * VALUE_DIM, dtype), *case.numbers(),
    )  # fmt: skip


def check(call, atol=2e-5, **options):
    got, right = kernel(*call, **options), expected(*call, **options)
    assert np.isfinite(np.asarray(right[0], np.float32)).all()
    assert np.abs(np.asarray(right[0], np.float32)).max() > 0.1
    np.testing.assert_allclose(np.asarray(got[0], np.float32), np.asarray(right[0], np.float32), atol=atol, rtol=0)
    for pages, right_pages in zip(got[1:], right[1:], strict=True):
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (pages, right_pages)))
    return got


DECODE = (1, [0, 5, 63, 64, 390, 23], [1, 1, 1, 1, 1, 0])
VERIFY = (4, [0, 61, 390, 16], [4, 3, 1, 0])
PREFILL = (65, [0, 39, 8, 130], [65, 11, 64, 0])


@pytest.mark.parametrize("shape", [DECODE, VERIFY, PREFILL])
def test_agrees_with_the_reference(shape):
    check(make_call(*shape))


@pytest.mark.parametrize("shape", [DECODE, PREFILL])
@pytest.mark.parametrize("options", [{"window": 70}, {"window": 3, "sinks": SINKS}, {"sinks": SINKS, "soft_cap": 0.7}])
def test_windows_sinks_and_soft_cap(shape, options):
    check(make_call(*shape), **options)


def test_keys_of_few_rows_are_shared_out():
    """One sequence of several blocks of keys: as many programs take them as there are blocks for."""
    call = make_call(1, [600], [1])
    assert gpu._plan(call[0], call[2], WIDTH * PAGE, scale=1, window=None, soft_cap=None, has_sinks=False).splits > 1
    check(call)
    check(call, sinks=SINKS, window=200)


def test_many_rows_are_not_shared_out():
    call = make_call(1, list(range(3, 70)), [1] * 67)
    assert gpu._plan(call[0], call[2], WIDTH * PAGE, scale=1, window=None, soft_cap=None, has_sinks=False).splits == 1
    check(call)
    check(call, sinks=SINKS)


def test_pages_that_are_no_power_of_two_and_wide_heads():
    check(make_call(5, [0, 61, 290], [5, 4, 2], dim=256, page=13))


def test_pages_before_the_window_are_not_read():
    """They hold NaN, as pages that have been freed may."""
    call = make_call(1, [200], [1])
    k_pages, v_pages = (pages.at[:, call[6][0, :8]].set(jnp.nan) for pages in call[3:5])
    got = kernel(*call[:3], k_pages, v_pages, *call[5:], window=70)
    right = expected(*call, window=70)
    np.testing.assert_allclose(got[0], right[0], atol=2e-5, rtol=0)


def test_bfloat16_is_as_good_as_bfloat16():
    call = make_call(*PREFILL, dtype=jnp.bfloat16)
    got = check(call, atol=0.05)[0]
    right = expected(*(x.astype(jnp.float32) for x in call[:5]), *call[5:])[0]
    error = np.sqrt(np.square(got.astype(jnp.float32) - right).mean() / np.square(right).mean())
    assert 1e-5 < error < 2**-7


def test_two_runs_are_equal_to_the_bit():
    call = make_call(*VERIFY)
    for a, b in zip(kernel(*call), kernel(*call), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_it_refuses():
    call = make_call(1, [3], [1])
    assert gpu.accepts(*call, scale=1) is None
    assert gpu.accepts(*call, scale=1, max_length=9) == "max_length asks for a form with a derivative"
    narrow = call[0][..., :24], call[1][..., :24], *call[2:]
    assert gpu.accepts(*narrow, scale=1) == "head_dim 24 is not 16, 32, 64, 128 or 256"
