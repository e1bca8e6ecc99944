"""The TPU kernels, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.short_conv import reference, tpu

CHANNELS, LAYERS, SLOTS = 256, 2, 13

kernel = jax.jit(functools.partial(tpu.short_conv, interpret=pltpu.InterpretParams()))
expected = jax.jit(reference.short_conv)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def check(x, read_slots, write_slots, lengths, width=4, bias=True, dtype=jnp.float32, run=kernel, slots=SLOTS):
    """Agrees on valid outputs and on the whole state array, to which only the rows' slots are written."""
    state = normal(1, LAYERS, slots, width - 1, CHANNELS, dtype=dtype)
    rows = map(jnp.array, (read_slots, write_slots, lengths))
    weight, offset = normal(2, CHANNELS, width), normal(3, CHANNELS) if bias else None
    arguments = (x.astype(dtype), weight, state, 1, *rows, offset)
    y, new_state = run(*arguments)
    right, right_state = expected(*arguments)
    valid = np.arange(x.shape[1]) < np.array(lengths)[:, None]
    assert y.dtype == dtype
    np.testing.assert_allclose(np.array(y, np.float32)[valid], np.array(right, np.float32)[valid], atol=3e-6, rtol=1e-2)
    np.testing.assert_array_equal(new_state, right_state)
    return new_state


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_token_of_more_rows_than_a_block(dtype):
    rows = 9
    lengths = [1, 1, 0, 1, 1, 1, 0, 1, 1]
    x = normal(0, rows, 1, CHANNELS).at[jnp.array(lengths) == 0].set(jnp.nan)
    state = check(x, [1, 1, 3, 4, 5, 6, 0, 8, 9], [10, 11, 12, 4, 5, 6, 0, 8, 2], lengths, dtype=dtype)
    assert np.isfinite(np.array(state, np.float32)).all()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [17, 32])
def test_blocks_of_rows_on_two_cores_without_a_race(rows, capfd):
    """Three blocks are one core's, of which the last is filled up; four are shared by two."""
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True, random_seed=4)
    run = jax.jit(functools.partial(tpu.short_conv, interpret=params))
    read = [1 + number // 2 for number in range(rows)]
    write = [rows - number + 40 for number in range(rows)]
    check(normal(0, rows, 1, CHANNELS), read, write, [1] * rows, run=run, slots=80)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("tokens", [2, 70, 300])
def test_many_tokens(tokens):
    """300 tokens are two blocks, of which the last is filled in part."""
    lengths = [tokens, min(tokens, 257), 1, 0]
    x = normal(0, 4, tokens, CHANNELS).at[np.arange(tokens) >= np.array(lengths)[:, None]].set(jnp.nan)
    state = check(x, [3, 3, 5, 7], [1, 3, 2, 4], lengths)
    assert np.isfinite(state).all()


@pytest.mark.parametrize("tokens", [1, 70])
def test_two_taps_without_bias(tokens):
    check(normal(0, 2, tokens, CHANNELS), [3, 1], [2, 4], [tokens, tokens], width=2, bias=False)


def test_what_it_refuses():
    x, state = normal(0, 2, 1, 200), normal(1, 1, 3, 3, 200)
    assert tpu.accepts(x, normal(2, 200, 4), state) == "200 channels are not a multiple of 128"
    assert tpu.accepts(x, normal(2, 256, 10), state) == "10 taps are not 2 to 9"
    assert tpu.accepts(x, normal(2, 256, 4), state) is None
