"""Logits and greedy tokens against the reference implementations' recorded output, by every route to them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxhybrid as jh
from jaxhybrid.layers.context import Execution
from jaxhybrid.state.arrays import pool_arrays
from jaxhybrid.state.batch import BatchAddress

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(folder.parent.name for folder in GOLDENS.glob("*/golden.npz"))
TOLERANCE = 2e-4  # of the logits' standard deviation
ODD_CHUNK = 37
CONFIG = jh.EngineConfig(
    max_sequences=4, max_tokens=4096, page_size=16, prefill_chunks=(ODD_CHUNK,), prefill_rows=4, steps_per_dispatch=16
)

pytestmark = pytest.mark.golden


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest):
    folder = GOLDENS / request.param
    with np.load(folder / "golden.npz") as arrays:
        return folder, dict(arrays)


@pytest.fixture(scope="module")
def model(golden):
    return jh.load_model(golden[0])


@pytest.fixture(scope="module")
def engine(model):
    return jh.Engine(model, CONFIG)


def close(actual: np.ndarray, expected: np.ndarray, deviation: float) -> None:
    worst = np.abs(np.asarray(actual) - expected).max() / deviation
    assert worst <= TOLERANCE, f"differs by {worst:.1e} of the logits' standard deviation"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_there_are_two_goldens_of_each_family() -> None:
    families = [name.rsplit("_", 1)[0] for name in NAMES]
    assert all(families.count(family) >= 2 for family in ("kimi_linear", "qwen3_next", "qwen3"))


def test_forward_equals_the_reference(golden, model) -> None:
    _, arrays = golden
    for ids, expected in zip(arrays["input_ids"], arrays["logits"], strict=True):
        assert len(ids) >= 300
        close(jh.forward(model, ids), expected, arrays["logits"].std())


def test_mixed_batch_in_odd_chunks_equals_the_reference(golden, engine) -> None:
    """Four lengths at once, of which none ends a chunk or a page with another."""
    _, arrays = golden
    cuts = [(0, 1), (1, 90), (0, 203), (1, 320)]
    jobs = [engine.submit(arrays["input_ids"][row][:length]) for row, length in cuts]
    while any(job.phase != "done" for job in jobs):
        engine.step()
    for job, (row, length) in zip(jobs, cuts, strict=True):
        assert job.error is None
        close(job.sequence.logits(), arrays["logits"][row, length - 1], arrays["logits"].std())
        job.sequence.release()
    engine.delete(tenant="default")


def test_token_by_token_decode_equals_the_reference(golden, engine) -> None:
    """Recorded tokens through the decode loop from an almost empty cache: every probability is the reference's."""
    _, arrays = golden
    ids = arrays["input_ids"]
    sequences = [engine.prefill(row[:1]) for row in ids]
    made = engine.generate(sequences, jh.Sampling(max_tokens=319), forced=[row[1:] for row in ids])
    for sequence, generation, row, logits in zip(sequences, made, ids, arrays["logits"], strict=True):
        expected = np.take_along_axis(log_softmax(logits[:-1]), row[1:, None], axis=-1)[:, 0]
        close(np.array(generation.log_probs), expected, arrays["logits"].std())
        close(sequence.logits(), logits[-1], arrays["logits"].std())
        sequence.release()
    engine.delete(tenant="default")


def test_greedy_tokens_by_every_route(golden, engine) -> None:
    """Cold, from a prefix hit, from a fork, from a resumed checkpoint, alone and in a batch: the same 64 tokens."""
    _, arrays = golden
    length = int(arrays["prefill_length"])
    prompts = [row[:length] for row in arrays["input_ids"]]
    expected = [tuple(row.tolist()) for row in arrays["greedy"]]
    greedy = jh.Sampling(max_tokens=64)
    cold = [engine.prefill(prompt) for prompt in prompts]
    mark = cold[0].checkpoint(pin=True)
    child = cold[1].fork()
    batch = engine.generate([*cold, child], greedy)
    assert [made.tokens for made in batch] == [*expected, expected[1]]
    hit = engine.prefill(prompts[0])
    assert hit.reuse.gap == 0
    assert hit.reuse.resumed == length
    resumed = engine.resume(mark)
    assert engine.generate([hit], greedy)[0].tokens == expected[0]
    assert engine.generate([resumed], greedy)[0].tokens == expected[0]
    for sequence in (*cold, child, hit, resumed):
        sequence.release()
    mark.release()
    engine.delete(tenant="default")
    assert engine.stats().live_slots == engine.stats().live_pages == 0


@pytest.mark.parametrize("name", ["kimi_linear_b", "qwen3_next_a"])
def test_scanned_layers_and_stacked_experts_equal_the_reference(name: str) -> None:
    """The layout that accelerators run."""
    with np.load(GOLDENS / name / "golden.npz") as arrays:
        ids, logits = arrays["input_ids"][0], arrays["logits"][0]
    model = jh.load_model(GOLDENS / name, execution=Execution(scan_layers=True, stack_experts=True))
    close(jh.forward(model, ids), logits, logits.std())


def test_multi_token_prediction_equals_the_reference() -> None:
    with np.load(GOLDENS / "kimi_linear_gated" / "golden.npz") as arrays:
        ids, expected = arrays["input_ids"], arrays["mtp_logits"]
    model = jh.load_model(GOLDENS / "kimi_linear_gated")
    rows, length = ids.shape

    @jax.jit
    def further(parameters: nnx.State, tokens: jnp.ndarray) -> jnp.ndarray:
        decoder = nnx.merge(model.graph, parameters)
        table = 1 + jnp.arange(rows * 6, dtype=jnp.int32).reshape(rows, 6)
        slots = 1 + jnp.arange(rows, dtype=jnp.int32)
        address = BatchAddress(jnp.zeros(rows, jnp.int32), jnp.full(rows, length - 1), table, slots, slots)
        outputs, _ = decoder.trunk(tokens[:, :-1], pool_arrays(decoder.layout, rows + 1, rows * 6 + 1, 64), address)
        state = pool_arrays(decoder.mtp_layout, rows + 1, rows * 6 + 1, 64)
        return decoder.predict_further(tokens[:, 1:], outputs, state, address)[0]

    actual = further(model.parameters, ids)
    close(actual[:, : expected.shape[1]], expected, expected.std())
