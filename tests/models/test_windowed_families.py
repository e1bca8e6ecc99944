"""What published configurations of the dense and windowed families say, and what they may not say."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxhybrid import models
from jaxhybrid.config import (
    ActivationSpec,
    AttentionSpec,
    DenseSpec,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    MoeSpec,
    RopeSpec,
    YarnScaling,
)
from jaxhybrid.errors import ConfigError
from jaxhybrid.models.rope_keys import with_rope_scaling

CONFIGS = Path(__file__).parents[2] / "configs"


def read(name: str, **changes: object) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text()) | changes


def translate(values: dict) -> ModelConfig:
    return models.translate(values, "config.json")


def attention(config: ModelConfig, layer: int) -> AttentionSpec:
    mixer = config.layers[layer].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


def windows(config: ModelConfig) -> list[int | None]:
    return [attention(config, layer).sliding_window for layer in range(len(config.layers))]


def test_llama_3_1() -> None:
    config = translate(read("llama-3.1-8b"))
    assert set(config.layers) == {config.layers[0]}
    scaled = RopeSpec(5e5, 128, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert attention(config, 0) == AttentionSpec(32, 8, 128, scaled)
    biased = attention(translate(read("llama-3.1-8b", attention_bias=True)), 0)
    assert biased == dataclasses.replace(attention(config, 0), qkv_bias=True, o_bias=True)


def test_mistral_7b() -> None:
    assert windows(translate(read("mistral-7b-v0.1"))) == [4096] * 32
    assert windows(translate(read("mistral-7b-v0.1", sliding_window=None))) == [None] * 32


def test_qwen3_moe() -> None:
    config = translate(read("qwen3-30b-a3b", mlp_only_layers=[3], decoder_sparse_step=2))
    assert [isinstance(layer.ffn, MoeSpec) for layer in config.layers[:6]] == [False, True, False, False, False, True]
    moe = translate(read("qwen3-30b-a3b")).layers[0].ffn
    assert moe == MoeSpec(128, 8, 768, 0, False, "softmax", True)


@pytest.mark.parametrize(
    ("name", "window", "layers", "scale", "width"),
    [("gemma-3-1b", 512, 26, 256, 256), ("gemma-3-4b", 1024, 34, 256, 256), ("gemma-3-27b", 1024, 62, 168, 128)],
)
def test_gemma_3(name: str, window: int, layers: int, scale: int, width: int) -> None:
    config = translate(read(name))
    assert windows(config) == [None if (layer + 1) % 6 == 0 else window for layer in range(layers)]
    assert attention(config, 0).scale == attention(config, 5).scale == scale**-0.5
    assert attention(config, 0).rope == RopeSpec(1e4, width)
    assert attention(config, 5).rope == RopeSpec(1e6, width, scaling=None if layers == 26 else LinearScaling(8.0))
    assert all(layer.post_norms for layer in config.layers)
    assert config.layers[0].ffn == DenseSpec(config.layers[0].ffn.intermediate_size, ActivationSpec("gelu_tanh"))
    assert (config.embedding_scale, config.tie_word_embeddings) == (config.hidden_size**0.5, True)
    assert config.zero_centred_norms
    assert config.eos_token_ids == (1, 106)


@pytest.mark.parametrize(("name", "layers", "experts"), [("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)])
def test_gpt_oss(name: str, layers: int, experts: int) -> None:
    config = translate(read(name))
    assert windows(config) == [128, None] * (layers // 2)
    scaling = YarnScaling(32.0, 4096, truncate=False)
    plain = AttentionSpec(64, 8, 64, RopeSpec(150000, 64, scaling=scaling), qkv_bias=True, o_bias=True, sinks=True)
    assert attention(config, 1) == plain
    act = ActivationSpec("gpt_oss", limit=7.0)
    moe = MoeSpec(experts, 4, 2880, 0, False, "softmax", True, activation=act, biases=True)
    assert {layer.ffn for layer in config.layers} == {moe}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama-3.1-8b", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("llama-3.1-8b", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope' is not supported"),
        ("llama-3.1-8b", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "expected key 'low_freq_factor'"),
        ("mistral-7b-v0.1", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("qwen3-30b-a3b", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("gemma-3-1b", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ("gemma-3-1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ("gemma-3-1b", {"layer_types": ["full_attention"] * 25}, "layer_types: expected 26 of"),
        ("gemma-3-4b", {"text_config": {"hidden_size": 8}}, "text_config: expected key 'num_hidden_layers'"),
        ("gpt-oss-20b", {"layer_types": ["mamba"] * 24}, "layer_types: expected 24 of"),
        ("gpt-oss-20b", {"experts_per_token": 5}, "num_experts_per_tok=4 contradicts experts_per_token=5"),
    ],
)
def test_unsupported_options_are_named(name: str, changes: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: ") as caught:
        translate(read(name, **changes))
    assert named in str(caught.value)


def test_another_rope_scaling_takes_the_place_of_the_published_one() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    stretched = translate(with_rope_scaling(read("qwen3-30b-a3b"), yarn))
    assert attention(stretched, 0).rope == RopeSpec(1e6, 128, scaling=YarnScaling(4.0, 32768))
    assert stretched.max_position_embeddings == 131072
    linear = {"rope_type": "linear", "factor": 2.0}
    stretched = translate(with_rope_scaling(read("llama-3.1-8b"), linear))
    assert attention(stretched, 0).rope == RopeSpec(5e5, 128, scaling=LinearScaling(2.0))
    assert stretched.max_position_embeddings == 262144
    newer = read("mistral-7b-v0.1", rope_parameters={"rope_theta": 7.0, "rope_type": "llama3", "factor": 8.0})
    del newer["rope_theta"]
    assert attention(translate(with_rope_scaling(newer, linear)), 0).rope == RopeSpec(
        7.0, 128, scaling=LinearScaling(2.0)
    )


def test_another_rope_scaling_reaches_only_global_layers_of_gemma_3() -> None:
    linear = {"rope_type": "linear", "factor": 16.0, "original_max_position_embeddings": 32768}
    config = translate(with_rope_scaling(read("gemma-3-4b"), linear))
    assert attention(config, 0).rope == RopeSpec(1e4, 256)
    assert attention(config, 5).rope == RopeSpec(1e6, 256, scaling=LinearScaling(16.0))


def test_a_rope_scaling_without_a_factor_or_a_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected rope_type and factor, found \{'rope_type': 'yarn'\}"):
        with_rope_scaling(read("llama-3.1-8b"), {"rope_type": "yarn"})
    with pytest.raises(ConfigError, match="expected original_max_position_embeddings, which the config does not say"):
        with_rope_scaling(read("gemma-3-4b"), {"rope_type": "linear", "factor": 2.0})


def test_dynamic_scaling_goes_on_where_the_trained_positions_end() -> None:
    config = translate(read("mistral-7b-v0.1", rope_scaling={"type": "dynamic", "factor": 3.0}))
    assert attention(config, 0).rope == RopeSpec(1e4, 128, scaling=DynamicScaling(3.0, 32768))
    assert config.max_position_embeddings == 98304
    assert translate(read("mistral-7b-v0.1")).max_position_embeddings == 32768
    stretched = with_rope_scaling(read("mistral-7b-v0.1"), {"rope_type": "dynamic", "factor": 3.0})
    assert translate(stretched) == config
