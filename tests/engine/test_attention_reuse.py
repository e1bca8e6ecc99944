"""A model without recurrent state can be resumed at any token of a path whose pages are kept."""

from pathlib import Path

import numpy as np
import pytest

import jaxhybrid as jh

GOLDEN = Path(__file__).parents[1] / "goldens" / "qwen3_a"


@pytest.fixture(scope="module")
def engine() -> jh.Engine:
    config = jh.EngineConfig(
        max_sequences=3, max_tokens=2048, page_size=16, prefill_chunks=(16, 64), steps_per_dispatch=8, poison=True
    )
    return jh.Engine(jh.load_model(GOLDEN), config)


@pytest.mark.parametrize(("shared", "own"), [(37, 9), (64, 1), (100, 0)])
def test_a_prompt_resumes_where_it_leaves_another(engine: jh.Engine, shared: int, own: int) -> None:
    ids = np.load(GOLDEN / "golden.npz")["input_ids"][0]
    first = engine.prefill(ids[:150])
    prompt = [*ids[:shared].tolist(), *[(int(ids[shared]) + 1 + n) % 90 for n in range(own)]]
    second = engine.prefill(prompt)
    assert second.reuse.matched == shared
    assert second.reuse.gap == (0 if own else 1)  # a prompt that is all known needs its last token's logits
    expected = np.asarray(jh.forward(engine.model, prompt))[-1]
    assert np.abs(second.logits() - expected).max() < 2e-4 * expected.std()
    made = engine.generate([first], jh.Sampling(max_tokens=4))[0]
    again = np.asarray(jh.forward(engine.model, first.tokens[:-1]))[-1]
    assert made.tokens[-1] == int(again.argmax())
    first.release()
    second.release()
    engine.delete(tenant="default")
    assert engine.stats().live_pages == engine.stats().live_slots == 0
