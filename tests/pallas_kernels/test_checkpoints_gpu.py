"""States at requested boundaries within a prefill: the interpreted GPU kernels against the references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import gpu as delta_gpu
from pallas_kernels.gated_delta import reference as delta_reference
from pallas_kernels.short_conv import gpu as conv_gpu
from pallas_kernels.short_conv import reference as conv_reference
from pallas_kernels.ssd import gpu as ssd_gpu
from pallas_kernels.ssd import reference as ssd_reference

TOKENS, LAYERS, SLOTS = 70, 2, 12
LENGTHS, READ, WRITE = [TOKENS, 64, 33], [3, 3, 5], [2, 1, 5]
# Two in one chunk, the later one first; at a chunk's edge and at a row's end; none, of two kinds.
CHECKPOINTS = {
    "checkpoint_lengths": jnp.array([[31, 1], [64, 32], [33, 0]]),
    "checkpoint_slots": jnp.array([[6, 4], [11, 8], [0, 9]]),
}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def delta(per_channel):
    decay = (2, 32) if per_channel else (2,)
    inputs = (
        normal(0, 3, TOKENS, 1, 32), normal(1, 3, TOKENS, 1, 32), normal(2, 3, TOKENS, 2, 64),
        -jnp.exp(normal(3, 3, TOKENS, *decay)), jax.nn.sigmoid(normal(4, 3, TOKENS, 2)),
    )  # fmt: skip
    return delta_gpu.gated_delta, delta_reference.gated_delta, inputs, normal(9, LAYERS, SLOTS, 2, 32, 64)


def mamba2():
    inputs = (
        normal(0, 3, TOKENS, 4, 16), jax.nn.softplus(normal(1, 3, TOKENS, 4)), -jnp.exp(normal(2, 4)),
        normal(3, 3, TOKENS, 2, 16), normal(4, 3, TOKENS, 2, 16), normal(5, 4),
    )  # fmt: skip
    return ssd_gpu.ssd, ssd_reference.ssd, inputs, normal(9, LAYERS, SLOTS, 4, 16, 16)


def convolution():
    inputs = (normal(0, 3, TOKENS, 40), normal(1, 40, 4))
    return conv_gpu.short_conv, conv_reference.short_conv, inputs, normal(9, LAYERS, SLOTS, 3, 40)


CASES = {"KDA": delta(True), "Gated DeltaNet": delta(False), "Mamba-2": mamba2(), "short_conv": convolution()}


@pytest.mark.parametrize("name", CASES)
def test_each_is_the_state_there(name):
    """On the whole state array but for the null slot, with NaN in padding."""
    function, reference, inputs, state = CASES[name]
    padding = np.arange(TOKENS) >= np.array(LENGTHS)[:, None]
    inputs = [x.at[padding].set(jnp.nan) if x.shape[:2] == (3, TOKENS) else x for x in inputs]
    arguments = (*inputs, state, 1, *map(jnp.array, (READ, WRITE, LENGTHS)))
    got = jax.jit(functools.partial(function, interpret=True))(*arguments, **CHECKPOINTS)
    right = jax.jit(reference)(*arguments, **CHECKPOINTS)
    np.testing.assert_allclose(np.array(got[0])[~padding], np.array(right[0])[~padding], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(got[1][:, 1:], right[1][:, 1:], atol=1e-5, rtol=1e-5)
    assert not np.allclose(got[1][1, 6], got[1][1, 2], atol=0.1)


def test_after_a_single_token():
    function, reference, inputs, state = CASES["KDA"]
    arguments = (*(x[:, :1] for x in inputs), state, 0, *map(jnp.array, (READ, WRITE, [1, 1, 0])))
    checkpoints = {
        "checkpoint_lengths": jnp.array([[1], [0], [0]]),
        "checkpoint_slots": jnp.array([[6], [0], [0]]),
    }
    got, right = function(*arguments, interpret=True, **checkpoints), reference(*arguments, **checkpoints)
    np.testing.assert_allclose(got[1][:, 1:], right[1][:, 1:], atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(got[1][0, 6], got[1][0, 2])
