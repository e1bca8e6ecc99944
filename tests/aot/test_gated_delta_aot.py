"""The gated delta rule compiles for every part at published shapes, and moves no state besides the rows' own."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels.gated_delta import gated_delta

pytestmark = pytest.mark.aot

LAYERS, DIM = 2, 128
# Key heads, value heads, decay per channel.
MODELS = {
    "kimi_linear": (32, 32, True),
    "qwen3_next": (16, 32, False),
    "qwen3_5_small": (16, 16, False),
    "qwen3_5_large": (16, 64, False),
    "kimi_linear_on_8_chips": (4, 4, True),
}


def arguments(model, batch, tokens, slots):
    key_heads, value_heads, per_channel = MODELS[model]

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    keys = array(batch, tokens, key_heads, DIM, dtype=jnp.bfloat16)
    decay = (batch, tokens, value_heads, DIM) if per_channel else (batch, tokens, value_heads)
    rows = array(batch, dtype=jnp.int32)
    return (
        keys, keys, array(batch, tokens, value_heads, DIM, dtype=jnp.bfloat16), array(*decay),
        array(batch, tokens, value_heads), array(LAYERS, slots, value_heads, DIM, DIM), array(dtype=jnp.int32),
        rows, rows, rows,
    )  # fmt: skip


def compile_and_check(part, model, batch, tokens):
    shapes = arguments(model, batch, tokens, slots=batch + 2)
    compiled = aot.compile_for(part, gated_delta, *shapes, donate=(5,))
    state = shapes[5]
    state_bytes = state.size * 4
    assert "gated_delta" in compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes == state_bytes
    # No temporary is as large as one layer's states of the batch: nothing gathers them.
    assert compiled.memory_analysis().temp_size_in_bytes < state_bytes // LAYERS
    return compiled, shapes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("batch", [1, 64, 256])
def test_tpu_decode(tpu, model, batch):
    compiled, shapes = compile_and_check(tpu, model, batch, 1)
    _, value_heads, _ = MODELS[model]
    state_bytes = 2 * batch * value_heads * DIM * DIM * 4
    others = sum(x.size * x.dtype.itemsize for i, x in enumerate(shapes) if i != 5) + batch * value_heads * DIM * 4
    assert compiled.cost_analysis()["bytes accessed"] <= 1.1 * (state_bytes + others)
