"""The TPU kernel, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from paged_cases import PagedCase

from pallas_kernels.latent_attention import reference, tpu

PAGE, WIDTH, HEADS, NOPE, VALUE, RANK = 16, 26, 3, 24, 40, 256
# Memory that was never written is NaN to the interpreter.
kernel = jax.jit(functools.partial(tpu.latent_attention, scale=0.2, interpret=pltpu.InterpretParams()))
expected = jax.jit(functools.partial(reference.latent_attention, scale=0.2))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(tpu, "_BLOCK_TOKENS", 128)


def make_call(tokens, starts, lengths, rope=20, dtype=jnp.float32, nope=NOPE, value=VALUE):
    case = PagedCase(starts, lengths, tokens, PAGE, WIDTH)
    new = (case.rows(*shape, dtype=dtype) for shape in ((HEADS, nope), (HEADS, rope), (RANK,), (rope,)))
    weights = (jnp.asarray(case.rng.standard_normal((HEADS, dim, RANK)) * RANK**-0.5, dtype) for dim in (nope, value))
    return (*new, *weights, case.pages(RANK + rope, dtype), *case.numbers())


def check(call, run=kernel, right=expected, atol=2e-5):
    """Agrees with the reference, in pages to the bit."""
    (out, pages), (right, right_pages) = run(*call), right(*call)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(right, np.float32), atol=atol, rtol=0)
    np.testing.assert_array_equal(np.asarray(pages, np.float32), np.asarray(right_pages, np.float32))


# Blocks are of 128 keys: before, at and after their edges, none at all, and in the third.
STARTS, ONE = [0, 127, 128, 40, 300, 111], [1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("rope", [20, pytest.param(0, marks=pytest.mark.slow)])
def test_one_token(rope):
    check(make_call(1, STARTS, ONE, rope))


@pytest.mark.parametrize(("tokens", "lengths"), [(5, [5, 3, 1, 0, 4, 2]), (70, [64, 70, 63, 0, 65, 1])])
def test_several_tokens(tokens, lengths):
    check(make_call(tokens, STARTS, lengths))


@pytest.mark.slow
def test_blocks_of_queries(monkeypatch):
    monkeypatch.setattr(tpu, "_ROWS", 64)
    run = jax.jit(functools.partial(tpu.latent_attention, scale=0.2, interpret=pltpu.InterpretParams()))
    check(make_call(70, [0, 127, 40], [64, 70, 1]), run)


@pytest.mark.parametrize(("rope", "value"), [(64, 128), pytest.param(0, 256, marks=pytest.mark.slow)])
def test_expanded_latents(rope, value, monkeypatch):
    monkeypatch.setattr(tpu, "expansion_pays", lambda *_: True)
    monkeypatch.setattr(tpu, "_ROWS", 32)
    run = jax.jit(functools.partial(tpu.latent_attention, scale=0.1, interpret=pltpu.InterpretParams()))
    call = make_call(70, [0, 127, 40, 300], [64, 70, 1, 0], rope, nope=128, value=value)
    check(call, run, right=jax.jit(functools.partial(reference.latent_attention, scale=0.1)))


def test_the_form_goes_by_tokens_and_widths():
    assert not tpu.expands(1, 128, 128, 512)
    assert tpu.expands(2048, 128, 128, 512)
    assert not tpu.expands(2048, 64, 128, 512)


@pytest.mark.parametrize("tokens", [1, 20])
def test_bfloat16(tokens):
    """Queries and sums in latent space are rounded to bfloat16, as xla.py's are."""
    check(make_call(tokens, [0, 127, 300], [1, tokens, tokens // 2], dtype=jnp.bfloat16), atol=3e-2)


def test_two_runs_are_equal_to_the_bit():
    call = make_call(1, STARTS, ONE)
    np.testing.assert_array_equal(kernel(*call)[0], kernel(*call)[0])


def test_what_it_refuses():
    call = make_call(1, [3], [1])
    assert tpu.accepts(*call, scale=0.2) is None
    narrow = (*call[:2], call[2][..., :200], *call[3:])
    assert tpu.accepts(*narrow) == "a latent of 200 is not a multiple of 128"
    small = (*call[:6], call[6][:, :, :4], *call[7:])
    assert tpu.accepts(*small) == "pages of 4 tokens are not a multiple of 8"
