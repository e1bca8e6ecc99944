"""The GPU kernel of `latent_attention`, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_cases import PagedCase

from pallas_kernels.latent_attention import gpu, reference

HEADS, NOPE, ROPE, VALUE, RANK, PAGE, WIDTH = 3, 24, 16, 40, 64, 16, 40
SCALE = (NOPE + ROPE) ** -0.5

kernel = jax.jit(functools.partial(gpu.latent_attention, scale=SCALE, interpret=True))
expected = jax.jit(functools.partial(reference.latent_attention, scale=SCALE))


def make_call(tokens, starts, lengths, dtype=jnp.float32):
    case = PagedCase(starts, lengths, tokens, PAGE, WIDTH)
    rows = functools.partial(case.rows, dtype=dtype)
    w_k, w_v = (jnp.asarray(case.rng.standard_normal((HEADS, dim, RANK)) * RANK**-0.5, dtype) for dim in (NOPE, VALUE))
    return (
        rows(HEADS, NOPE), rows(HEADS, ROPE), rows(RANK), rows(ROPE), w_k, w_v,
        case.pages(RANK + ROPE, dtype), *case.numbers(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "starts", "lengths"),
    [
        (1, [0, 5, 31, 32, 390, 23], [1, 1, 1, 1, 1, 0]),
        (1, [600], [1]),
        (4, [0, 61, 390, 16], [4, 3, 1, 0]),
        (65, [0, 39, 8, 130], [65, 11, 64, 0]),
    ],
)
def test_agrees_with_the_reference(tokens, starts, lengths):
    call = make_call(tokens, starts, lengths)
    got, right = kernel(*call), expected(*call)
    assert np.abs(right[0]).max() > 0.1
    np.testing.assert_allclose(got[0], right[0], atol=2e-5, rtol=0)
    np.testing.assert_array_equal(got[1], right[1])
    np.testing.assert_array_equal(kernel(*call)[0], got[0])


def test_bfloat16_is_as_good_as_bfloat16():
    call = make_call(65, [0, 39], [65, 11], jnp.bfloat16)
    got = kernel(*call)[0].astype(jnp.float32)
    right = expected(*(x.astype(jnp.float32) for x in call[:7]), *call[7:])[0]
    error = np.sqrt(np.square(got - right).mean() / np.square(right).mean())
    assert 1e-5 < error < 2**-6


def test_what_it_refuses():
    call = make_call(1, [3], [1])
    assert gpu.accepts(*call, scale=1) is None
    assert gpu.accepts(*call, scale=1, max_length=9) == "max_length asks for a form with a derivative"
    odd = *call[:2], call[2][..., :48], *call[3:]
    assert gpu.accepts(*odd, scale=1) == "latent_dim 48 is not 16, 32, 64, 128, 256 or 512"
