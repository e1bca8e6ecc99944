"""Wrong values in a config.json: refused one by one in its file's name, and never by another error than ConfigError."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxhybrid import models
from jaxhybrid.config import AttentionSpec, DenseSpec
from jaxhybrid.errors import ConfigError

ROOT = Path(__file__).parents[2]
PUBLISHED = {file.stem: json.loads(file.read_text()) for file in (ROOT / "configs").glob("*.json")}
GOLDENS = {file.parent.name: json.loads(file.read_text()) for file in (ROOT / "tests/goldens").glob("*/config.json")}
OF_FAMILIES = {config["model_type"]: name for name, config in sorted(GOLDENS.items())}
VALUES = ["abc", None, -1, 0, 1.5, [], {}, True, 10**12, float("nan"), [1], ["x"], {"a": 1}, [None]]


def paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Where a value may be replaced; of a long list, its first."""
    if path:
        yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value[:1])
        for key, inner in items:
            yield from paths(inner, (*path, key))


def replaced(config: dict, path: tuple, value: Any) -> dict:
    changed = copy.deepcopy(config)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def refusal(config: dict) -> str | None:
    try:
        models.translate(config, "c.json")
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", OF_FAMILIES.values())
def test_any_value_anywhere_is_read_or_refused(name: str) -> None:
    config = GOLDENS[name]
    changed = [replaced(config, path, value) for path in paths(config) for value in VALUES]
    messages = [message for values in changed if (message := refusal(values))]
    assert len(messages) > 200
    assert {message[:8] for message in messages} == {"c.json: "}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3-8b", {"num_key_value_heads": 5}, "num_attention_heads in groups of num_key_value_heads, got 32 and 5"),
        ("llama-3.1-8b", {"hidden_size": 31}, "expected rope over an even number of a head's channels, got 0"),
        ("jamba-1.5-mini", {"hidden_size": 31}, "expected a positive head_dim, got 0"),
        ("qwen3-8b", {"head_dim": 127}, "expected rope over an even number of a head's channels, got 127"),
        ("qwen3-8b", {"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "needs more than one pair"),
        (
            "qwen3-8b",
            {"max_position_embeddings": 2**31 - 1, "rope_scaling": {"type": "dynamic", "factor": 2}},
            "below 2**31",
        ),
        (
            "qwen3-8b",
            {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
            "expected low_freq_factor below high_freq_factor, got 4.0 and 4.0",
        ),
        (
            "qwen3-8b",
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}},
            "expected beta_fast from beta_slow up, got 1.0 and 2.0",
        ),
        ("deepseek-v3.2", {"index_head_dim": 63}, "expected an index_head_dim from 64 (rope) up, got 63"),
        ("deepseek-v4-flash", {"o_groups": 7}, "expected num_attention_heads in o_groups, got 64 and 7"),
        ("qwen3-next-80b-a3b", {"linear_num_key_heads": 5}, "value heads in groups of a key head, got 32 and 5"),
        ("nemotron-h-8b", {"n_groups": 7}, "expected Mamba-2's heads in n_groups, got 128 and 7"),
        ("nemotron-h-8b", {"time_step_limit": [2, 1]}, "expected a time_step_limit that rises, got (2.0, 1.0)"),
        (
            "granite-4.0-h-1b",
            {"shared_intermediate_size": 0, "num_local_experts": 0},
            "expected a positive size of a feed-forward, got 0",
        ),
        ("deepseek-v3", {"n_group": 7}, "expected experts in n_group groups, got 256 and 7"),
        ("deepseek-v3", {"topk_group": 9}, "expected a topk_group from 1 to n_group=8, got 9"),
        ("deepseek-v3", {"topk_group": 1, "num_experts_per_tok": 33}, "expected from 1 to 32 of 256 experts a token"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 0}, "expected from 1 to 128 of 128 experts a token, got 0"),
    ],
)
def test_values_that_do_not_go_together_are_refused(name: str, changes: dict, message: str) -> None:
    found = refusal(PUBLISHED[name] | changes)
    assert found is not None
    assert found.startswith("c.json: ")
    assert message in found


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("text_config", {"hidden_size": 1000}, "out_hidden_size to be the text's hidden_size, got 1024 and 1000"),
        ("text_config", {"vocab_size": 248057}, "expected placeholder tokens below vocab_size=248057, got [248057]"),
        ("vision_config", {"in_channels": 1}, "vision_config: in_channels=1 is not supported, expected 3"),
        ("vision_config", {"num_heads": 5}, "a tower's heads must have a multiple of 4 channels"),
    ],
)
def test_a_tower_must_fit_its_text_model(part: str, changes: dict, message: str) -> None:
    config = PUBLISHED["qwen3.5-0.8b"]
    assert message in str(refusal(config | {part: config[part] | changes}))


def test_null_has_the_meaning_that_transformers_gives_it() -> None:
    """As many key and value heads as queries; one group of experts."""
    config = models.translate(PUBLISHED["llama-3.1-8b"] | {"num_key_value_heads": None}, "c.json")
    assert isinstance(config.layers[0].mixer, AttentionSpec)
    assert config.layers[0].mixer.num_key_value_heads == 32
    one_group = models.translate(PUBLISHED["deepseek-v2-lite"] | {"n_group": None, "topk_group": None}, "c.json")
    assert one_group == models.translate(PUBLISHED["deepseek-v2-lite"], "c.json")


def test_qwen3_next_without_experts_is_dense() -> None:
    config = models.translate(PUBLISHED["qwen3-next-80b-a3b"] | {"num_experts": 0}, "c.json")
    assert {type(layer.ffn) for layer in config.layers} == {DenseSpec}
