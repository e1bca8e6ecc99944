"""Logits and greedy tokens against the reference implementations' recorded output, by every route to them."""

import json
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxhybrid as jh
from jaxhybrid.layers.context import Execution
from jaxhybrid.models import FAMILIES, family_of
from jaxhybrid.models.weight_table import WeightTable
from jaxhybrid.state.arrays import pool_arrays
from jaxhybrid.state.batch import BatchAddress

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(folder.parent.name for folder in GOLDENS.glob("*/golden.npz"))
TOLERANCE = 2e-4  # of the logits' standard deviation
# Median over all logits, of bf16 weights and activations: a tiny router that flips throws single positions far off.
BFLOAT16_TOLERANCE = 0.06
ODD_CHUNK = 37
CONFIG = jh.EngineConfig(
    max_sequences=4, max_tokens=4096, page_size=16, prefill_chunks=(ODD_CHUNK,), prefill_rows=4, row_buckets=(4,),
    steps_per_dispatch=16,
)  # fmt: skip

# Tensors that may change without changing any logit: (golden, tensor) patterns and the reason.
UNFELT: dict[tuple[str, str], str] = {
    (r"qwen3_5\w*_vl", r"model\.visual\..*"): "only images pass the tower: tests/test_media.py",
    (r"kimi_k3_.", r"(vision_tower|mm_projector)\..*"): "only images pass the tower: tests/test_media.py",
    (r"kimi_k3_.", r".*\.layers\.0\.self_attention_res_(norm|proj)\.weight"): "one candidate is no choice",
}

pytestmark = pytest.mark.golden


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in NAMES])
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


def test_every_family_has_two_goldens() -> None:
    configs = [json.loads((GOLDENS / name / "config.json").read_text()) for name in NAMES]
    found = Counter(family_of(config, "here").__name__ for config in configs)
    assert {family.__name__: found[family.__name__] for family in FAMILIES.values()} == found
    assert min(found.values()) >= 2


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


def test_every_tensor_is_felt(golden, model) -> None:
    """A tensor that may change without a logit changing is one that nobody reads."""
    folder, arrays = golden
    table = WeightTable(model.config, Execution.for_platform("cpu"))
    family_of(json.loads((folder / "config.json").read_text()), folder.name).weights(table, model.config)
    flat = dict(nnx.to_flat_state(model.parameters))
    trunk = [rule for rule in table.rules if rule.path[0] != "mtp"]
    excused = [name for (golden_pattern, name) in UNFELT if re.fullmatch(golden_pattern, folder.name)]
    unfelt = {rule.name: rule for rule in trunk if not any(re.fullmatch(name, rule.name) for name in excused)}
    rng = np.random.default_rng(0)
    for length in (60, 320):  # few tokens are enough for most; the long way is for what is rarely chosen or far back
        ids = arrays["input_ids"][0, :length]
        before = np.asarray(jh.forward(model, ids))
        for name, rule in list(unfelt.items()):
            changed = {**flat, rule.path: flat[rule.path].replace(_perturbed(flat[rule.path][...], rule.index, rng))}
            other = jh.Model(model.config, model.graph, nnx.from_flat_state(changed), model.dtypes, model.path)
            other.__dict__["_chunk_logits"] = model._chunk_logits  # one compiled program for all
            if np.abs(np.asarray(jh.forward(other, ids)) - before).max() > 1e-6:
                del unfelt[name]
    assert sorted(unfelt) == []


def _perturbed(leaf: jnp.ndarray, index: tuple[int, ...], rng: np.random.Generator) -> jnp.ndarray:
    value = np.array(leaf)
    part = value[index]
    if np.issubdtype(value.dtype, np.integer):
        value[index] = (part + 1) % (part.max() + 1)
    else:
        value[index] = part + 0.3 * rng.normal(size=part.shape)
    return jnp.asarray(value)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in NAMES[::2]])
def test_scanned_layers_and_stacked_experts_in_bfloat16_stay_near(name: str) -> None:
    """The layout and the dtype that accelerators run."""
    with np.load(GOLDENS / name / "golden.npz") as arrays:
        ids, logits = arrays["input_ids"][0, :120], arrays["logits"][0, :120]
    stacked = Execution(scan_layers=True, stack_experts=True)
    close(jh.forward(jh.load_model(GOLDENS / name, execution=stacked), ids), logits, logits.std())
    low = jh.load_model(GOLDENS / name, dtype="bfloat16", execution=stacked)
    apart = np.median(np.abs(np.asarray(jh.forward(low, ids)) - logits)) / logits.std()
    assert apart <= BFLOAT16_TOLERANCE


def test_multi_token_prediction_equals_the_reference(golden, model) -> None:
    _, arrays = golden
    if "mtp_logits" not in arrays:
        assert not model.config.mtp_layers
        return
    ids, expected = arrays["input_ids"], arrays["mtp_logits"]
    rows, length = ids.shape

    @jax.jit
    def further(parameters: nnx.State, tokens: jnp.ndarray) -> jnp.ndarray:
        decoder = nnx.merge(model.graph, parameters)
        table = 1 + jnp.arange(rows * 6, dtype=jnp.int32).reshape(rows, 6)
        slots = 1 + jnp.arange(rows, dtype=jnp.int32)
        address = BatchAddress(jnp.zeros(rows, jnp.int32), jnp.full(rows, length - 1), table, slots, slots)
        stream, _ = decoder.stream(tokens[:, :-1], pool_arrays(decoder.layout, rows + 1, rows * 6 + 1, 64), address)
        state = pool_arrays(decoder.mtp_layout, rows + 1, rows * 6 + 1, 64)
        return decoder.predict_further(tokens[:, 1:], stream, state, address)[0]

    actual = further(model.parameters, ids)
    close(actual[:, : expected.shape[1]], expected, expected.std())
