"""Another rope scaling than the checkpoint's, asked for when it is loaded."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import jaxhybrid as jh
from jaxhybrid.engine.identity import schema_of

GOLDEN = Path(__file__).parent / "goldens" / "mistral_b"
IDS = np.random.default_rng(1).integers(3, 107, 25)
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.fixture(scope="module")
def stretched() -> jh.Model:
    return jh.load_model(GOLDEN, rope_scaling=LINEAR)


def test_it_equals_a_config_that_says_so(stretched: jh.Model, tmp_path: Path) -> None:
    folder = tmp_path / "edited"
    shutil.copytree(GOLDEN, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scaling": LINEAR, "max_position_embeddings": 4 * config["max_position_embeddings"]}
    (folder / "config.json").write_text(json.dumps(config))
    edited = jh.load_model(folder)
    assert edited.config == stretched.config
    assert edited.config_fingerprint == stretched.config_fingerprint
    np.testing.assert_array_equal(jh.forward(edited, IDS), jh.forward(stretched, IDS))


def test_its_state_is_another_ones(stretched: jh.Model, tmp_path: Path) -> None:
    published = jh.load_model(GOLDEN)
    assert stretched.config.max_position_embeddings == 4 * published.config.max_position_embeddings
    assert np.abs(np.asarray(jh.forward(published, IDS)) - jh.forward(stretched, IDS)).max() > 0.1
    ours, theirs = (schema_of(model, 16, "default") for model in (stretched, published))
    assert ours.positional_rule != theirs.positional_rule
    assert ours.config != theirs.config
    assert ours.weights == theirs.weights


def test_a_saved_model_keeps_it(stretched: jh.Model, tmp_path: Path) -> None:
    stretched.save(tmp_path / "saved")
    again = jh.load_model(tmp_path / "saved")
    assert again.config == stretched.config
    np.testing.assert_array_equal(jh.forward(again, IDS), jh.forward(stretched, IDS))


def test_dynamic_scaling_equals_the_reference_token_by_token() -> None:
    """The reference decodes from an empty cache; here all positions at once give the same, and so does a cache."""
    with np.load(GOLDEN / "golden.npz") as arrays:
        ids, expected = arrays["dynamic_ids"], arrays["dynamic_logits"]
    scaling = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 48}
    model = jh.load_model(GOLDEN, rope_scaling=scaling)
    assert model.config.max_position_embeddings == 144
    np.testing.assert_allclose(jh.forward(model, ids), expected, atol=1e-4 * expected.std())
    engine = jh.Engine(model, jh.EngineConfig(max_sequences=1, max_tokens=256, prefill_chunks=(37,)))
    engine.prefill(ids[:90]).release()
    again = engine.prefill(ids)
    assert again.reuse.resumed == 90
    np.testing.assert_allclose(again.logits(), expected[-1], atol=1e-4 * expected.std())


@pytest.mark.parametrize(("name", "rules"), [("falcon_h1_a", 1), ("deepseek_v32_a", 2), ("jamba_a", 0)])
def test_the_positional_rule_names_every_rope_of_a_mixer(name: str, rules: int) -> None:
    """Also those of the attention beside a Mamba, and of an indexer."""
    rule = schema_of(jh.load_model(GOLDEN.parent / name), 16, "default").positional_rule
    assert rule.count("'theta'") == rules
