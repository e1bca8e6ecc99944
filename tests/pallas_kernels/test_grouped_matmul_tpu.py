"""What is the TPU kernel's own: its tiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import EXPERTS, INNER, WIDTH, expected, make_call, swiglu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import tpu, tpu_expert, tpu_few


@pytest.mark.parametrize("few", [True, False])
def test_an_inner_width_in_parts_that_do_not_divide_it(monkeypatch, few):
    """320 inner channels as 128, 128 and 64: what the last part reads beyond the matrices counts for nothing."""
    monkeypatch.setattr(tpu_expert, "BLOCK_BYTES", 3 * WIDTH * 4 * 128)
    monkeypatch.setattr(tpu_few, "fits", lambda x: few)
    assert tpu_expert.tiling(60, EXPERTS, INNER, WIDTH, 3 * WIDTH * 4) == (32, 128)
    run = jax.jit(functools.partial(tpu.routed_experts, interpret=pltpu.InterpretParams(), activation=swiglu))
    call = make_call(20, (3,))
    np.testing.assert_allclose(run(*call), expected(*call, activation=swiglu), atol=2e-5, rtol=1e-5)


def test_tokens_stay_in_vmem_as_long_as_they_fit():
    assert tpu_few.fits(jnp.zeros((256, 2880), jnp.bfloat16))
    assert not tpu_few.fits(jnp.zeros((2048, 2048), jnp.bfloat16))
