"""A config.json that transformers has saved again means what the published one means.

`saved_configs.json` has what it changes: scripts/make_saved_configs.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxhybrid import models
from jaxhybrid.config import ModelConfig
from jaxhybrid.errors import ConfigError
from jaxhybrid.models.rope_keys import with_rope_scaling

CONFIGS = Path(__file__).parents[2] / "configs"
CHANGES = json.loads((Path(__file__).parent / "saved_configs.json").read_text())


def published(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def saved(name: str) -> dict[str, Any]:
    change = CHANGES[name]
    return {key: value for key, value in published(name).items() if key not in change["gone"]} | change["set"]


def without_text_ends(config: ModelConfig) -> ModelConfig:
    """transformers writes its own defaults where a file names no first or last token."""
    return replace(config, bos_token_id=None, eos_token_ids=())


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_saved_config_means_the_same(name: str) -> None:
    before, after = models.translate(published(name), name), models.translate(saved(name), name)
    assert without_text_ends(after) == without_text_ends(before)
    if before.eos_token_ids:
        assert after.eos_token_ids == before.eos_token_ids


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave=False is not supported"),
        ("deepseek-v3", {"qk_head_dim": 256}, "qk_head_dim=256 is not supported, expected 192"),
        (
            "deepseek-v3.2",
            {"layer_types": ["full_attention"] * 61},
            "expected deepseek_sparse_attention or indexed_att",
        ),
        (
            "deepseek-v3",
            {"layer_types": ["indexed_attention"] * 61},
            "layer_types: expected full_attention, got indexed",
        ),
        (
            "deepseek-v4-flash",
            {"mlp_layer_types": ["moe", "hash_moe"]},
            "mlp_layer_types: expected hash_moe and then moe",
        ),
        (
            "deepseek-v4-flash",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported, expected 0.125",
        ),
        ("deepseek-v4-flash", {"rope_theta": 7}, "rope_theta=7 is not supported, expected 10000"),
        (
            "deepseek-v4-flash",
            {"compress_rope_theta": 7},
            "expected main plain and compress with theta 7, got",
        ),
        ("gpt-oss-20b", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported, expected 1.702"),
        ("gemma-3-4b", {"tie_word_embeddings": False}, "tie_word_embeddings=True contradicts False"),
        ("kimi-linear-48b-a3b", {"linear_num_heads": 3}, "linear_num_heads=3 is not supported, expected 32"),
        ("kimi-linear-48b-a3b", {"layer_types": ["full_attention"] * 27}, "layer_types="),
    ],
)
def test_a_saved_config_that_contradicts_itself_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        models.translate(saved(name) | changes, name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bamba-9b", {"max_position_embeddings": None}),
        ("nemotron-h-8b", {"mamba_d_state": 128}),
        ("qwen3-30b-a3b", {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}),
        ("granite-4.0-h-1b", {"name_or_path": "somewhere"}),
    ],
)
def test_keys_of_other_releases_of_a_family(name: str, changes: dict[str, Any]) -> None:
    """Found in published files: of Bamba 2T, Nemotron-H 47B, Qwen3-Coder 480B, and in fine-tuned models."""
    values = {key: value for key, value in (published(name) | changes).items() if value is not None}
    assert models.translate(values, name).layers == models.translate(published(name), name).layers


def test_qwen3_6_names_the_gate_of_its_delta_rule() -> None:
    values = published("qwen3.5-27b")
    expected = models.translate(values, "here")
    values["text_config"]["output_gate_type"] = "swish"
    assert models.translate(values, "here") == expected
    values["text_config"]["output_gate_type"] = "sigmoid"
    with pytest.raises(ConfigError, match="output_gate_type='sigmoid' is not supported, expected 'swish' or 'silu'"):
        models.translate(values, "here")


def test_a_mistral_may_list_the_layers_with_a_window() -> None:
    values = published("mistral-7b-v0.1") | {"layer_types": ["full_attention", *["sliding_attention"] * 3] * 8}
    windows = [layer.mixer.sliding_window for layer in models.translate(values, "here").layers]
    assert windows == [None, 4096, 4096, 4096] * 8
    with pytest.raises(ConfigError, match="layer_types: expected 32 of sliding_attention or full_attention, got"):
        models.translate(values | {"layer_types": ["full_attention"]}, "here")


def test_a_stretched_deepseek_v4_is_stretched_where_it_sees_far() -> None:
    scaling = {"rope_type": "yarn", "factor": 32, "beta_fast": 32, "beta_slow": 1}
    scaling |= {"original_max_position_embeddings": 65536}
    made = [
        models.translate(with_rope_scaling(values, scaling), "here")
        for values in (published("deepseek-v4-flash"), saved("deepseek-v4-flash"))
    ]
    assert made[0] == made[1]
    assert made[0].max_position_embeddings == 2097152
