"""A layer's convolutions and Mamba-2's recurrence compile into one kernel for every part at published shapes."""

import jax.numpy as jnp
import pytest
from conftest import installed

from pallas_kernels import aot
from pallas_kernels.published_case import PREFILL_TOKENS, total_bytes
from pallas_kernels.published_state_space import conv_ssd_case

pytestmark = pytest.mark.aot


def compile_and_check(part, model, tokens, **options):
    case = conv_ssd_case(model, 2, tokens, **options)
    compiled = aot.compile_for(part, case.function, *case.arguments, donate=case.donated)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert "conv_ssd_prefill" in text
    assert "short_conv_prefill" not in text
    assert memory.alias_size_in_bytes >= total_bytes(*(case.arguments[n] for n in case.donated))
    # Nothing as large as the inputs of many tokens is copied.
    assert memory.temp_size_in_bytes < total_bytes(case.arguments[0]) // 8 + (1 << 18)
    return aot.hbm_bytes(compiled) / case.fewest_bytes


@pytest.mark.parametrize("model", ["Nemotron 3 Nano 30B", "Granite 4.0 H Small"])
def test_tpu_prefill(tpu, model):
    assert compile_and_check(tpu, model, PREFILL_TOKENS) <= 1.1


def test_tpu_prefill_of_float32_and_of_a_last_chunk_in_part():
    compile_and_check(installed("tpu-v6e"), "Nemotron 3 Nano 30B", 1000, dtype=jnp.float32)
