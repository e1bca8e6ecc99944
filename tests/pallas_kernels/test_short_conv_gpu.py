"""The GPU kernel of `short_conv`, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.short_conv import gpu, reference

# More channels than a block, and no whole number of blocks.
CHANNELS, LAYERS, SLOTS = 200, 2, 9

kernel = jax.jit(functools.partial(gpu.short_conv, interpret=True))
expected = jax.jit(reference.short_conv)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def check(tokens, lengths, read_slots, write_slots, width=4, bias=True, dtype=jnp.float32, state_dtype=None):
    """Agrees on valid outputs and on the whole state array; padding holds NaN, which goes nowhere."""
    x = normal(0, len(lengths), tokens, CHANNELS, dtype=dtype)
    x = x.at[np.arange(tokens) >= np.array(lengths)[:, None]].set(jnp.nan)
    state = normal(1, LAYERS, SLOTS, width - 1, CHANNELS, dtype=state_dtype or dtype)
    weight, offset = normal(2, CHANNELS, width), normal(3, CHANNELS) if bias else None
    arguments = (x, weight, state, 1, *map(jnp.array, (read_slots, write_slots, lengths)), offset)
    y, new_state = kernel(*arguments)
    right, right_state = expected(*arguments)
    valid = np.arange(tokens) < np.array(lengths)[:, None]
    assert y.dtype == dtype
    np.testing.assert_allclose(np.array(y, np.float32)[valid], np.array(right, np.float32)[valid], atol=3e-6, rtol=1e-2)
    assert np.isfinite(np.array(new_state, np.float32)).all()
    np.testing.assert_array_equal(new_state, right_state)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_token(dtype):
    check(1, [1, 1, 0, 1], [1, 1, 3, 4], [5, 2, 3, 4], dtype=dtype)


@pytest.mark.parametrize("tokens", [2, 32, 33])
def test_many_tokens(tokens):
    """A block is 16 tokens; slots of the third and fourth row are written where they were read."""
    check(tokens, [tokens, min(tokens, 31), 1, 2, 0], [3, 3, 5, 7, 8], [1, 2, 5, 7, 4])


@pytest.mark.parametrize("tokens", [1, 70])
def test_two_taps_without_bias_and_a_state_of_another_dtype(tokens):
    check(tokens, [tokens, tokens], [3, 1], [2, 4], width=2, bias=False, state_dtype=jnp.bfloat16)
