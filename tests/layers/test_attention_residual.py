"""Attention residuals against their definition with a list of blocks, layer by layer and scanned."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxhybrid as jh
from jaxhybrid.config import AttentionResidual, DenseSpec, LayerSpec, ModelConfig
from jaxhybrid.layers.attention_residual import BlockEnds, BlockMixture, BlockResidual
from jaxhybrid.layers.context import Execution, LayerContext
from jaxhybrid.layers.segments import plan_segments
from jaxhybrid.models.random_folder import write_random_folder

GOLDEN = Path(__file__).parents[1] / "goldens" / "kimi_k3_b"
EPS = 1e-5
SEALS = [True, False, True, False, False]  # of five layers with one part each


def context() -> LayerContext:
    layers = tuple(LayerSpec(None, DenseSpec(7), seals_block=seals) for seals in SEALS)
    config = ModelConfig("any", 11, 6, layers, EPS, False, False, 64, residual=AttentionResidual())
    return LayerContext(config, Execution(False, False), jnp.float32)


def randomised(module: BlockResidual | BlockEnds, rng: np.random.Generator) -> BlockMixture:
    mixture = module.mixture
    mixture.norm.weight = nnx.Param(jnp.asarray(rng.normal(1.0, 0.3, 6), jnp.float32))
    mixture.proj.weight = nnx.Param(jnp.asarray(rng.normal(0.0, 2.0, (1, 6)), jnp.float32))
    return mixture


def mixed(mixture: BlockMixture, candidates: list[np.ndarray]) -> np.ndarray:
    """softmax over candidates of (V / rms(V)) . (norm weight * projection), of the candidates as they are."""
    values = np.stack(candidates).astype(np.float64)
    normed = values / np.sqrt((values**2).mean(-1, keepdims=True) + EPS)
    scores = normed @ np.asarray(mixture.norm.weight[...] * mixture.proj.weight[...][0], np.float64)
    shares = np.exp(scores - scores.max(0))
    return ((shares / shares.sum(0))[..., None] * values).sum(0)


def test_parts_see_mixtures_of_sealed_blocks_and_the_sum_so_far() -> None:
    rng = np.random.default_rng(0)
    embedded = rng.normal(size=(2, 3, 6)).astype(np.float32)
    ends = BlockEnds(context())
    stream = ends.start(jnp.asarray(embedded))
    blocks: list[np.ndarray] = []
    running = embedded.astype(np.float64)
    for number, seals in enumerate(SEALS):
        residual = BlockResidual(context(), seals)
        mixture = randomised(residual, rng)
        x, held = residual.enter(stream)
        np.testing.assert_allclose(x, mixed(mixture, [*blocks, running]), atol=2e-5)
        if number == 0:
            np.testing.assert_array_equal(x, embedded)  # with nothing sealed there is no choice
        if seals:
            blocks, running = [*blocks, running], np.zeros_like(running)
        output = rng.normal(size=running.shape).astype(np.float32)
        running = running + output
        stream = residual.leave(held, jnp.asarray(output))
    mixture = randomised(ends, rng)
    np.testing.assert_allclose(ends.end(stream), mixed(mixture, [*blocks, running]), atol=2e-5)
    assert stream[0].shape == (sum(SEALS), 2, 3, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine layers: the dense first one, and four times two of which the second seals a block."""
    config = json.loads((GOLDEN / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": 9, "attn_res_block_size": 2, "num_experts": 3, "num_experts_per_token": 2}
    text["linear_attn_config"] |= {"kda_layers": [1, 3, 5, 7, 9], "full_attn_layers": [2, 4, 6, 8]}
    return write_random_folder(tmp_path_factory.mktemp("kimi_k3"), config)


def test_scanned_layers_say_what_separate_ones_say(folder: Path) -> None:
    ids = list(range(3, 24))
    logits = []
    for scan in (False, True):
        model = jh.load_model(folder, execution=Execution(scan_layers=scan, stack_experts=False))
        logits.append(np.asarray(jh.forward(model, ids)))
    assert [plan.repeats for plan in plan_segments(model.config.layers, scan=True)] == [1, 4]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4 * logits[0].std())


def test_blocks_that_are_not_sealed_yet_are_not_seen() -> None:
    mixture = randomised(BlockResidual(context(), False), np.random.default_rng(1))
    blocks = jnp.full((2, 1, 1, 6), 9.0).at[0].set(2.0)
    seen = jax.jit(mixture)((blocks, jnp.int32(1), jnp.ones((1, 1, 6))))
    np.testing.assert_allclose(seen, mixed(mixture, [np.full((1, 1, 6), 2.0), np.ones((1, 1, 6))]), atol=1e-6)
