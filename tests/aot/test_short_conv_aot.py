"""The short convolution compiles for every TPU at published shapes, and moves little besides tokens and states."""

import pytest

from pallas_kernels import aot
from pallas_kernels.published import DECODE_BATCHES, PREFILL_TOKENS, short_conv_case

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("model", ["Kimi Linear 48B", "Qwen3-Next 80B"])
@pytest.mark.parametrize(("batch", "tokens"), [*((batch, 1) for batch in DECODE_BATCHES), (2, PREFILL_TOKENS)])
def test_tpu(tpu, model, batch, tokens):
    case = short_conv_case(model, batch, tokens)
    compiled = aot.compile_for(tpu, case.function, *case.arguments, donate=(case.donate,))
    assert f"short_conv_{case.form}" in compiled.as_text()
    # A single row is filled up to eight, and the filters are padded to whole tiles.
    assert aot.hbm_bytes(compiled) <= (1.1 * case.fewest_bytes if batch > 1 else 5_000_000)
