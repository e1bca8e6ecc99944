"""Mamba-1's and Mamba-2's kernels compile for every TPU at published shapes, and move little but the rows' states."""

import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels.published_case import PREFILL_TOKENS
from pallas_kernels.published_state_space import SSD_MODELS, selective_scan_case, ssd_case

pytestmark = pytest.mark.aot


def compile_and_check(part, case):
    """Bytes moved, of the fewest possible."""
    compiled = aot.compile_for(part, case.function, *case.arguments, donate=case.donated)
    memory = compiled.memory_analysis()
    assert f"{case.operator}_{case.form}" in compiled.as_text()
    assert memory.alias_size_in_bytes == case.arguments[case.donate].size * 4
    # Nothing as large as the states of a decode step or the values of many tokens is copied. Decay rates, half a MiB of
    # Mamba-1's, may be fetched ahead.
    assert memory.temp_size_in_bytes < case.fewest_bytes // 8 + (1 << 20)
    return aot.hbm_bytes(compiled) / case.fewest_bytes


@pytest.mark.parametrize(
    ("model", "batch"),
    [("Nemotron 3 Nano 30B", 1), *((model, 64) for model in SSD_MODELS), ("Nemotron 3 Nano 30B", 256)],
)
def test_ssd_decode(tpu, model, batch):
    # The vectors of a single row are padded to whole tiles.
    assert compile_and_check(tpu, ssd_case(model, batch, 1)) <= (1.1 if batch > 1 else 1.15)


@pytest.mark.parametrize("model", ["Nemotron 3 Nano 30B", "Nemotron 3 Super 120B, a chip of 8", "Granite 4.0 H Small"])
def test_ssd_prefill(tpu, model):
    assert compile_and_check(tpu, ssd_case(model, 2, PREFILL_TOKENS)) <= 1.1


def test_ssd_prefill_of_float32_and_of_a_last_chunk_in_part(tpu):
    compile_and_check(tpu, ssd_case("Nemotron 3 Nano 30B", 1, 1000, jnp.float32))


@pytest.mark.parametrize(
    ("model", "batch", "tokens"),
    [
        ("Jamba 1.5 Mini", 1, 1),
        ("Jamba 1.5 Mini", 64, 1),
        ("Jamba 1.5 Large", 256, 1),
        ("Jamba 1.5 Large", 2, PREFILL_TOKENS),
    ],
)
def test_selective_scan(tpu, model, batch, tokens):
    # The vectors of a single row are padded to eight.
    assert compile_and_check(tpu, selective_scan_case(model, batch, tokens)) <= (1.1 if batch > 1 else 2)
