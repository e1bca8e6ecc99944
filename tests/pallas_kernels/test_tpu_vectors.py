"""Rows spread along lanes by products, whatever the number of rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu_vectors import Spread


@pytest.mark.parametrize("counts", [(3,), (2, 4), (16, 16), (32, 32), (48,), (23, 23)])
def test_spread(counts):
    """(32, 32), (48,) and (23, 23) are several groups of rows: of 16, of 24, and of one.

    In which order a product adds up a number's three parts is the hardware's: some round the last bit.
    """
    keys, width = 24, 128
    values = [np.random.default_rng(n).standard_normal((count, keys), np.float32) for n, count in enumerate(counts)]
    spread = Spread(counts, width)
    columns = spread.columns([jnp.asarray(x) for x in values])
    assert columns.shape == (keys, spread.depth)
    for row in range(min(counts)):
        for found, value in zip(spread(columns, [row] * len(counts)), values, strict=True):
            wanted = np.repeat(value[row][:, None], width, axis=1)
            np.testing.assert_allclose(found, wanted, rtol=2**-23, atol=0)
