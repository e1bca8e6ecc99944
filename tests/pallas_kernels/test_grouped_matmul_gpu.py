"""What is the GPU kernels' own: their blocks and tiles."""

import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import EXPERTS, KERNELS, check, make_call

from pallas_kernels.grouped_matmul import gpu


@pytest.mark.parametrize(("width", "inner"), [(72, 136), (256, 128)])
@pytest.mark.parametrize("tokens", [5, 70])
def test_widths_that_blocks_do_and_do_not_divide(width, inner, tokens):
    """What a block has beyond the matrices counts for nothing, and beyond the outputs goes nowhere."""
    rng = np.random.default_rng(1)
    _, ids, weights, *_, valid = make_call(tokens, (3,))
    shapes = ((tokens, width), (EXPERTS, inner, width), (EXPERTS, inner, width), (EXPERTS, width, inner))
    wide, *stacks = (jnp.asarray(0.1 * rng.standard_normal(shape), jnp.float32) for shape in shapes)
    check(KERNELS["gpu"], (wide.at[3].set(jnp.nan), ids, weights, *stacks, valid))


def test_tiles_follow_the_mean_share():
    """Kimi Linear: one token, a decode of 64, prefills of 2,048 and 4,096; and widths of Nemotron 3 Nano."""
    shares = [gpu.tile_rows(assignments, 256, jnp.bfloat16) for assignments in (8, 512, 16384, 32768)]
    assert shares == [16, 16, 64, 128]
    assert gpu.tile_rows(32768, 256, jnp.float32) == 16
    assert gpu.tiling(16, 2, 1024, 2304) == gpu.Tiling(16, 64, 128)
    assert gpu.tiling(64, 2, 1024, 2304) == gpu.Tiling(64, 128, 64)
    assert gpu.tiling(128, 2, 1024, 2304) == gpu.Tiling(128, 64, 64)
    assert gpu.tiling(128, 1, 2304, 1024) == gpu.Tiling(128, 128, 64)
    assert gpu.tiling(128, 1, 1856, 2688) == gpu.Tiling(128, 64, 64)


@pytest.mark.parametrize("tokens", [1, 9])
def test_weights_of_experts_that_no_token_chose_are_not_read(tokens):
    call = make_call(tokens, experts=np.tile([[4, 1, 0]], (tokens, 1)))
    poisoned = [stack.at[jnp.array([2, 3, 5, 6])].set(jnp.nan) for stack in call[3:6]]
    check(KERNELS["gpu"], (*call[:3], *poisoned, call[6]))
