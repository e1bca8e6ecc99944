"""The gated delta rule compiles for every part at published shapes, and moves little besides the rows' own states."""

import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels.published import gated_delta_case
from pallas_kernels.published_case import DECODE_BATCHES, LAYERS, PREFILL_TOKENS
from pallas_kernels.published_models import DELTA_MODELS

pytestmark = pytest.mark.aot


def compile_and_check(part, model, batch, tokens, **options):
    case = gated_delta_case(model, batch, tokens, **options)
    compiled = aot.compile_for(part, case.function, *case.arguments, donate=(case.donate,))
    state, memory = case.arguments[case.donate], compiled.memory_analysis()
    assert f"gated_delta_{case.form}" in compiled.as_text()
    assert memory.alias_size_in_bytes == state.size * 4
    # Nothing as large as the states of the rows, or as the values of many tokens, is copied.
    moved = batch * state.size // state.shape[1] // LAYERS * 4 if tokens == 1 else case.arguments[2].size
    assert memory.temp_size_in_bytes < moved // 4 + (1 << 18)
    return aot.hbm_bytes(compiled) / case.fewest_bytes


@pytest.mark.parametrize("model", DELTA_MODELS)
@pytest.mark.parametrize("batch", DECODE_BATCHES)
def test_tpu_decode(tpu, model, batch):
    assert compile_and_check(tpu, model, batch, 1) <= 1.1


@pytest.mark.parametrize("model", ["Kimi Linear 48B, a chip of 8", "Qwen3.5, 16 value heads"])
def test_tpu_prefill(tpu, model):
    assert compile_and_check(tpu, model, 2, PREFILL_TOKENS) <= 1.1


def test_tpu_prefill_of_float32_and_of_a_last_chunk_in_part(tpu):
    compile_and_check(tpu, "Kimi Linear 48B", 1, 1000, dtype=jnp.float32)
