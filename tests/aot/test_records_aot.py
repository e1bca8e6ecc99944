"""The recurrent operators' other forms compile for every TPU, and move little besides what they must."""

import pytest

from pallas_kernels import aot
from pallas_kernels.published_records import (
    gated_delta_buffered_case,
    gated_delta_checkpoints_case,
    gated_delta_replay_case,
    gated_delta_verify_case,
)
from pallas_kernels.published_ssd_records import (
    ssd_buffered_case,
    ssd_checkpoints_case,
    ssd_replay_case,
    ssd_verify_case,
)

pytestmark = pytest.mark.aot


def compile_and_check(part, case, most=1.1):
    compiled = aot.compile_for(part, case.function, *case.arguments, donate=case.donated)
    memory = compiled.memory_analysis()
    assert f"{case.operator}_{case.form}" in compiled.as_text()
    # Rings of decays per head are padded to whole tiles.
    assert memory.alias_size_in_bytes >= sum(case.arguments[n].size * 4 for n in case.donated)
    assert aot.hbm_bytes(compiled) <= most * case.fewest_bytes


VERIFIED = [("Kimi Linear 48B", 64, 8), ("Qwen3-Next 80B", 1, 4)]


@pytest.mark.parametrize(("model", "batch", "tokens"), VERIFIED)
def test_gated_delta_verify(tpu, model, batch, tokens):
    compile_and_check(tpu, gated_delta_verify_case(model, batch, tokens))


@pytest.mark.parametrize(("model", "batch", "tokens"), VERIFIED)
def test_gated_delta_replay(tpu, model, batch, tokens):
    compile_and_check(tpu, gated_delta_replay_case(model, batch, tokens))


@pytest.mark.parametrize("model", ["Kimi Linear 48B", "Qwen3-Next 80B"])
def test_gated_delta_prefill_with_checkpoints(tpu, model):
    compile_and_check(tpu, gated_delta_checkpoints_case(model, 2))


@pytest.mark.parametrize(("model", "batch"), [("Kimi Linear 48B", 1), ("Qwen3.5, 64 value heads", 64)])
def test_gated_delta_buffered(tpu, model, batch):
    """The whole ring is fetched, which is half empty on average."""
    compile_and_check(tpu, gated_delta_buffered_case(model, batch), 1.25)


@pytest.mark.parametrize(("model", "batch", "tokens"), [("Nemotron 3 Nano 30B", 64, 8), ("Granite 4.0 H Small", 1, 4)])
def test_ssd_verify(tpu, model, batch, tokens):
    compile_and_check(tpu, ssd_verify_case(model, batch, tokens))


def test_ssd_replay(tpu):
    compile_and_check(tpu, ssd_replay_case("Nemotron 3 Nano 30B", 64, 4))


@pytest.mark.parametrize(("model", "batch"), [("Nemotron 3 Super 120B", 1), ("Granite 4.0 H Small", 64)])
def test_ssd_buffered(tpu, model, batch):
    """The whole ring goes in and out."""
    compile_and_check(tpu, ssd_buffered_case(model, batch), 1.3)


def test_ssd_prefill_with_checkpoints(tpu):
    compile_and_check(tpu, ssd_checkpoints_case("Nemotron 3 Nano 30B", 2))
