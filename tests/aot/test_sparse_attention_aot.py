"""Sparse attention compiles for every TPU at published shapes, writes its pages where they lie and holds little beside
them."""

import math

import pytest
from conftest import installed
from test_decoder_aot import compile_decode

from pallas_kernels import aot
from pallas_kernels.published_case import DECODE_BATCHES, PREFILL_TOKENS
from pallas_kernels.published_sparse import LONG, SHORT, SPARSE_MODELS, TOP_K, index_case, sparse_latent_attention_case

pytestmark = pytest.mark.aot
WHOLE, SHARE, GLM = SPARSE_MODELS


def compile_and_check(part, case, *names):
    compiled = aot.compile_for(part, case.function, *case.arguments, donate=case.donated)
    pages, memory = case.arguments[case.donate], compiled.memory_analysis()
    for name in names:
        assert name in compiled.as_text()
    # Rows are padded to whole lanes, a latent of 576 to 640.
    assert memory.alias_size_in_bytes == math.prod(pages.shape[:3]) * -(-pages.shape[3] // 128) * 256
    # No copy of pages, half the scores of a long context at the most, and a tenth of the rows that queries chose.
    assert memory.temp_size_in_bytes < case.tokens * TOP_K * 128 + (1 << 20)
    return aot.hbm_bytes(compiled) / case.fewest_bytes


def test_choice_of_a_decode_step(tpu):
    assert compile_and_check(tpu, index_case(WHOLE, 8, 1, LONG), "index_top_k") <= 1.1


def test_decode(tpu):
    """At worst every chosen row brings fifteen others along, and the padding of a latent."""
    case = sparse_latent_attention_case(SHARE, 8, 1, LONG)
    assert compile_and_check(tpu, case, "sparse_latent_attention_decode", "chosen_words") <= 18


@pytest.mark.parametrize("batch", DECODE_BATCHES[1:])
def test_decode_of_a_whole_model_reads_a_short_context_once(batch):
    part = installed("tpu-v6e")
    assert compile_and_check(part, index_case(WHOLE, batch, 1, SHORT), "index_top_k") <= 1.1
    case = sparse_latent_attention_case(WHOLE, batch, 1, SHORT)
    # Of 8,192 rows a query chose 2,048.
    assert compile_and_check(part, case, "sparse_latent_attention_decode") <= 4 * 1.2


def test_decode_of_widths_that_differ():
    part = installed("tpu-v6e")
    assert compile_and_check(part, index_case(GLM, 1, 1, LONG), "index_top_k") <= 1.1
    compile_and_check(part, sparse_latent_attention_case(GLM, 1, 1, LONG), "sparse_latent_attention_decode")


def test_verification():
    part = installed("tpu-v6e")
    compile_and_check(part, index_case(WHOLE, 8, 4, LONG), "index_top_k")
    compile_and_check(part, sparse_latent_attention_case(SHARE, 8, 4, LONG), "sparse_latent_attention_prefill")


def test_a_decode_loop_runs_in_kernels_and_copies_no_state():
    compiled, kernels, pool = compile_decode(installed("tpu-v6e"), "deepseek-v3.2", 4, 4)
    memory = compiled.memory_analysis()
    assert kernels == dict.fromkeys(("index_top_k", "sparse_latent_attention", "routed_experts"), "pallas")
    assert memory.alias_size_in_bytes >= pool
    # One layer's latents would be more, and one layer's experts.
    assert memory.temp_size_in_bytes < 192 << 20


@pytest.mark.parametrize("part", ["tpu-v5e", "tpu-7x"])
def test_choice_of_a_prefill(part):
    compile_and_check(installed(part), index_case(WHOLE, 1, PREFILL_TOKENS, LONG), "index_top_k")


@pytest.mark.parametrize("part", ["tpu-v5e", "tpu-v6e"])
def test_prefill(part):
    """Half of the tokens of a step at most, so that there is less to compile."""
    case = sparse_latent_attention_case(SHARE, 1, 512, LONG)
    compile_and_check(installed(part), case, "sparse_latent_attention_prefill", "chosen_words")
