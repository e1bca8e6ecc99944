"""Rows spread along lanes by products, whatever the number of rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu_vectors import Spread


def anything(rng, shape):
    return rng.standard_normal(shape, np.float32)


def exact_in_any_order(rng, shape):
    """No number is rounded up to a power of two by its first part: any sum of its parts is a float32 number."""
    signs = rng.choice([-1, 1], shape)
    return signs * np.ldexp(rng.uniform(1, 1.99, shape), rng.integers(-8, 8, shape))


@pytest.mark.parametrize(("draw", "tolerance"), [(anything, 2**-23), (exact_in_any_order, 0)])
@pytest.mark.parametrize("counts", [(3,), (2, 4), (16, 16), (32, 32), (48,), (23, 23)])
def test_spread(counts, draw, tolerance):
    """(32, 32), (48,) and (23, 23) are several groups of rows: of 16, of 24, and of one.

    In which order a product adds up a number's three parts is the hardware's: some round the last bit.
    """
    keys, width = 24, 128
    values = [draw(np.random.default_rng(n), (count, keys)).astype(np.float32) for n, count in enumerate(counts)]
    spread = Spread(counts, width)
    columns = spread.columns([jnp.asarray(x) for x in values])
    assert columns.shape == (keys, spread.depth)
    for row in range(min(counts)):
        for found, value in zip(spread(columns, [row] * len(counts)), values, strict=True):
            wanted = np.repeat(value[row][:, None], width, axis=1)
            np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=0)
