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
