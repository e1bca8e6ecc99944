"""A layer's convolution and delta rule compile into one kernel for every part at published shapes, in one pass."""

import jax.numpy as jnp
import pytest
from conftest import installed

from pallas_kernels import aot
from pallas_kernels.published import conv_gated_delta_case
from pallas_kernels.published_case import PREFILL_TOKENS, total_bytes

pytestmark = pytest.mark.aot


def compile_and_check(part, model, tokens, **options):
    case = conv_gated_delta_case(model, 2, tokens, **options)
    compiled = aot.compile_for(part, case.function, *case.arguments, donate=case.donated)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert "conv_gated_delta_prefill" in text
    assert "short_conv_prefill" not in text
    assert memory.alias_size_in_bytes >= total_bytes(*(case.arguments[n] for n in case.donated))
    # Nothing as large as the inputs of many tokens is copied.
    assert memory.temp_size_in_bytes < total_bytes(case.arguments[0]) // 8 + (1 << 18)
    return aot.hbm_bytes(compiled) / case.fewest_bytes


@pytest.mark.parametrize("model", ["Kimi Linear 48B", "Qwen3-Next 80B", "Qwen3.5, 64 value heads"])
def test_tpu_prefill(tpu, model):
    # What XLA lays out anew are gates a head, in VMEM; they are counted all the same.
    assert compile_and_check(tpu, model, PREFILL_TOKENS) <= 1.16


def test_tpu_prefill_of_float32_and_of_a_last_chunk_in_part():
    compile_and_check(installed("tpu-v6e"), "Qwen3-Next 80B", 1000, dtype=jnp.float32)
