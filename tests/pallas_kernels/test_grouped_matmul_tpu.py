"""What is the TPU kernel's own: its tiles."""

import functools

import jax
import numpy as np
from expert_cases import EXPERTS, INNER, WIDTH, expected, make_call, swiglu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import tpu


def test_an_inner_width_in_parts_that_do_not_divide_it(monkeypatch):
    """320 inner channels as 128, 128 and 64: what the last part reads beyond the matrices counts for nothing."""
    monkeypatch.setattr(tpu, "BLOCK_BYTES", 3 * WIDTH * 4 * 128)
    assert tpu.tiling(60, EXPERTS, INNER, WIDTH, 3 * WIDTH * 4) == (32, 128)
    run = jax.jit(functools.partial(tpu.routed_experts, interpret=pltpu.InterpretParams(), activation=swiglu))
    call = make_call(20, (3,))
    np.testing.assert_allclose(run(*call), expected(*call, activation=swiglu), atol=2e-5, rtol=1e-5)
