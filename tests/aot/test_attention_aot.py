"""Attention over pages compiles for every TPU at published shapes, writes its pages where they lie, and moves little
besides the keys and values that are seen."""

import math

import pytest
from conftest import installed

from pallas_kernels import aot
from pallas_kernels.published_attention import (
    LATENT_MODELS,
    PAGED_MODELS,
    latent_attention_case,
    paged_attention_case,
)
from pallas_kernels.published_case import DECODE_BATCHES, PREFILL_TOKENS

pytestmark = pytest.mark.aot
CASES = {"paged": paged_attention_case, "latent": latent_attention_case}


def compile_and_check(part, operator, model, batch, tokens):
    case = CASES[operator](model, batch, tokens)
    compiled = aot.compile_for(part, case.function, *case.arguments, donate=case.donated)
    pages, memory = [case.arguments[number] for number in case.donated], compiled.memory_analysis()
    assert f"{case.operator}_{case.form}" in compiled.as_text()
    # Rows are padded to whole lanes, such as a latent of 576 to 640.
    assert memory.alias_size_in_bytes == sum(math.prod(x.shape[:3]) * -(-x.shape[3] // 128) * 256 for x in pages)
    # Queries and outputs may be laid out anew, pages may not.
    assert memory.temp_size_in_bytes < 5 * case.arguments[0].size * max(1, 512 // case.tokens) + (1 << 20)
    return aot.hbm_bytes(compiled) / case.fewest_bytes


@pytest.mark.parametrize("model", ["Qwen3-Next 80B", "gpt-oss 120B, window"])
def test_decode(tpu, model):
    # A window of 128 is short beside queries, outputs and what pads heads of 64 to whole lanes.
    assert compile_and_check(tpu, "paged", model, 64, 1) <= (1.5 if "window" in model else 1.1)


def test_latent_decode(tpu):
    assert compile_and_check(tpu, "latent", "Kimi Linear 48B", 64, 1) <= 1.2


@pytest.mark.parametrize("model", [name for name, model in PAGED_MODELS.items() if not model.window])
@pytest.mark.parametrize("batch", DECODE_BATCHES[::2])
def test_decode_of_other_models(model, batch):
    assert compile_and_check(installed("tpu-v6e"), "paged", model, batch, 1) <= 1.1


@pytest.mark.parametrize("model", [*LATENT_MODELS][1:])
def test_latent_decode_of_other_models(model):
    # 128 heads' queries and outputs in latent space count for something.
    assert compile_and_check(installed("tpu-v6e"), "latent", model, 256, 1) <= (1.2 if "chip" in model else 1.3)


@pytest.mark.parametrize("part", ["tpu-v5e", "tpu-7x"])
def test_prefill(part):
    compile_and_check(installed(part), "paged", "Qwen3-Next 80B", 1, PREFILL_TOKENS)


@pytest.mark.parametrize("part", ["tpu-v5e", "tpu-v6e"])
def test_prefill_of_expanded_latents(part):
    """Half of the tokens of a step at most, so that there is less to compile."""
    compile_and_check(installed(part), "latent", "Kimi Linear 48B", 1, 512)
