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


def arguments(model, batch, tokens, slots, dtype=jnp.bfloat16):
    """As layers have them: the heads of a token side by side."""
    key_heads, value_heads, per_channel = MODELS[model]

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    keys = array(batch, tokens, key_heads * DIM, dtype=dtype)
    decay = array(batch, tokens, value_heads * (DIM if per_channel else 1))
    rows = array(batch, dtype=jnp.int32)
    return (
        keys, keys, array(batch, tokens, value_heads * DIM, dtype=dtype), decay, array(batch, tokens, value_heads),
        array(LAYERS, slots, value_heads, DIM, DIM), array(dtype=jnp.int32), rows, rows, rows,
    )  # fmt: skip


def flat_gated_delta(q, k, v, log_decay, beta, state, *slots):
    q, k, v = (x.reshape(*x.shape[:2], -1, DIM) for x in (q, k, v))
    if log_decay.shape != beta.shape:
        log_decay = log_decay.reshape(v.shape)
    out, state = gated_delta(q, k, v, log_decay, beta, state, *slots)
    return out.reshape(*out.shape[:2], -1), state


def compile_and_check(part, *shape, **options):
    shapes = arguments(*shape, **options)
    state = shapes[5]
    compiled = aot.compile_for(part, flat_gated_delta, *shapes, donate=(5,))
    memory = compiled.memory_analysis()
    assert "gated_delta" in compiled.as_text()
    assert memory.alias_size_in_bytes == state.size * 4
    # Nothing as large as the states of the rows, or as the values of many tokens, is copied.
    _, batch, tokens, *_ = shape
    moved = batch * state.size // state.shape[1] // LAYERS * 4 if tokens == 1 else shapes[2].size
    assert memory.temp_size_in_bytes < moved // 4 + (1 << 18)
    return compiled, shapes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("batch", [1, 64, 256])
def test_tpu_decode(tpu, model, batch):
    compiled, shapes = compile_and_check(tpu, model, batch, 1, batch + 2)
    _, value_heads, _ = MODELS[model]
    fewest = 2 * batch * value_heads * DIM * DIM * 4 + batch * value_heads * DIM * 4
    fewest += sum(x.size * x.dtype.itemsize for i, x in enumerate(shapes) if i != 5)
    assert compiled.cost_analysis()["bytes accessed"] <= 1.1 * fewest


@pytest.mark.parametrize("model", MODELS)
def test_tpu_prefill(tpu, model):
    compile_and_check(tpu, model, 2, 2048, 4)


def test_tpu_prefill_of_float32(tpu):
    compile_and_check(tpu, "kimi_linear", 1, 1000, 3, dtype=jnp.float32)
