"""The kernel of experts compiles for every TPU at published shapes, and reads weights where they lie."""

import pytest

from pallas_kernels import aot
from pallas_kernels.published_case import PREFILL_TOKENS
from pallas_kernels.published_experts import EXPERT_MODELS, routed_experts_case

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("Kimi Linear 48B", 64), ("Qwen3-Next 80B", PREFILL_TOKENS), ("DeepSeek-V3.2, a chip of 32", PREFILL_TOKENS)],
)
def test_tpu(tpu, model, tokens):
    case = routed_experts_case(model, tokens)
    compiled = aot.compile_for(tpu, case.function, *case.arguments, donate=case.donated)
    assert "routed_experts" in compiled.as_text()
    # Rows sorted by expert, their tiles filled up, and what the experts make of them: no weights.
    rows = 2 * EXPERT_MODELS[model].chosen * tokens + 256 * min(EXPERT_MODELS[model].experts, 8 * tokens)
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 2 * rows * EXPERT_MODELS[model].width
