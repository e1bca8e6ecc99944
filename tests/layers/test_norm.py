"""Norms of groups side by side: as a TPU computes them, by products, against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxhybrid.layers.norm import rms_norm, rms_norm_by_group
from pallas_kernels import registry


@pytest.mark.parametrize(("tokens", "groups", "features"), [(1, 4, 128), (7, 4, 128), (5, 8, 96), (3, 1, 64)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_the_norm(tokens, groups, features, dtype):
    keys = jax.random.split(jax.random.key(3), 3)
    # Groups of very different sizes: none may leak into another's scale.
    sizes = 10.0 ** jax.random.uniform(keys[0], (2, tokens, groups, 1), minval=-3, maxval=4)
    x = (sizes * jax.random.normal(keys[1], (2, tokens, groups, features))).astype(dtype)
    weight = jax.random.normal(keys[2], (groups, features)).astype(dtype)
    plain = rms_norm(x, weight, 1e-6).reshape(2, tokens, -1)
    with registry.target("tpu"):
        found = jax.jit(lambda x, weight: rms_norm_by_group(x, weight, 1e-6))(x, weight)
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(found.astype(jnp.float32), plain.astype(jnp.float32), rtol=tolerance, atol=tolerance)
