"""What the model card says is what is shipped."""

import json
import math
import re
from pathlib import Path

import pytest
from safetensors import safe_open

import jaxhybrid.demo
from jaxhybrid.demo.architecture import CONFIG
from jaxhybrid.demo.corpus import shipped_conversations
from jaxhybrid.demo.evaluation import evaluate
from jaxhybrid.model import load_model

FOLDER = Path(jaxhybrid.demo.__file__).parent
CARD = (FOLDER / "README.md").read_text(encoding="utf-8")


def figures(row: str) -> list[float]:
    """The numbers of a table row, by its first cell."""
    line = next(line for line in CARD.splitlines() if line.startswith(f"| {row} |"))
    return [float(cell.replace(",", "")) for cell in line.split("|")[2:-1]]


def test_parameters_are_counted_right():
    with safe_open(FOLDER / "model.safetensors", framework="np") as tensors:
        sizes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 (not a dict)
    total = sum(math.prod(shape) for shape in sizes)
    assert f"{total:,} parameters" in CARD
    assert 5e6 <= total <= 10e6


def test_the_config_is_the_one_that_is_trained():
    assert json.loads((FOLDER / "config.json").read_text()) == CONFIG


def test_the_package_stays_small():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= 20 * 2**20


def test_held_out_text_costs_clearly_less_than_with_xz():
    _, _, _, model, xz = figures("standard library")
    assert model < 0.95 * xz


@pytest.mark.parametrize("word", ["PSF-2.0", "Apache-2.0", "xz -9", "scripts/train_demo.py --evaluate"])
def test_sources_licences_and_method_are_named(word):
    assert word in CARD


@pytest.mark.slow
def test_the_figures_on_the_shipped_conversations_are_what_evaluation_gives():
    score = evaluate(load_model(FOLDER), list(shipped_conversations()))
    documents, text_bytes, tokens, model, xz = figures("agent conversations")
    assert (documents, text_bytes, tokens) == (score.documents, score.text_bytes, score.tokens)
    assert model == pytest.approx(score.model_bits_per_byte, abs=1.5e-3)
    assert xz == pytest.approx(score.xz_bits_per_byte, abs=1.5e-3)


def test_training_cost_is_stated():
    assert re.search(r"\d+ steps of 2,048 tokens", CARD)
