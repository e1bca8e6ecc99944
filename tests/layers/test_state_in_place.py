"""No program copies a state array: a donated one is updated where it lies, whatever the layers around it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxhybrid as jh
from jaxhybrid.state.arrays import pool_arrays
from jaxhybrid.state.batch import BatchAddress

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.mark.parametrize("name", ["kimi_linear_a", "qwen3_next_a", "nemotron_h_a", "deepseek_v32_a", "deepseek_v4_a"])
def test_one_token_of_one_sequence_moves_no_state_array(name: str) -> None:
    """The hardest case: XLA unrolls loops over one row, and fuses what is left."""
    model = jh.load_model(GOLDENS / name)
    pool = jax.eval_shape(lambda: pool_arrays(model.layout, 11, 301, 16))
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    address = BatchAddress(one, one, jax.ShapeDtypeStruct((1, 20), jnp.int32), one, one)

    def step(parameters, pool, tokens, address):
        return nnx.merge(model.graph, parameters).trunk(tokens, pool, address)

    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    program = jax.jit(step, donate_argnums=1).lower(model.parameters, pool, tokens, address).compile().as_text()
    for group, leaves in pool.items():
        for leaf, array in leaves.items():
            shape = f"f32[{','.join(map(str, array.shape))}]"
            assert shape in program or group == "output"
            assert not re.search(rf"= {re.escape(shape)}\S* copy\(", program), (group, leaf)
