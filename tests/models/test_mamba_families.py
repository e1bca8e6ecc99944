"""The Mamba hybrids' translations: published sizes and schedules, and refusals."""

import json
import math
from pathlib import Path

import jax
import pytest
from flax import nnx

from jaxhybrid import models
from jaxhybrid.config import (
    AttentionMamba2Spec,
    AttentionSpec,
    DenseSpec,
    Mamba1Spec,
    Mamba2Spec,
    ModelConfig,
    MoeSpec,
    RopeSpec,
)
from jaxhybrid.errors import ConfigError
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.decoder import abstract_decoder
from jaxhybrid.state.layout import StateDtypes, layout_of

CONFIGS = Path(__file__).parents[2] / "configs"


def translate(name: str, changes: dict | None = None) -> ModelConfig:
    values = json.loads((CONFIGS / f"{name}.json").read_text()) | (changes or {})
    return models.translate(values, name)


def parameters(module: nnx.Module) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.split(module)[1]))


# Trunk parameters in billions as published; bytes of keys and values a token, and of state in megabytes a sequence,
# with bfloat16 caches and float32 state.
SIZES = {
    "nemotron-h-8b": (8.1, 16_384, 102.1),
    "nemotron-3-nano-30b-a3b": (31.6, 6_144, 49.1),
    "nemotron-3-super-120b-a12b": (120.6, 8_192, 170.2),
    "jamba-1.5-mini": (51.6, 16_384, 16.06),
    "bamba-9b": (9.78, 12_288, 123.1),
    "granite-4.0-h-small": (32.2, 16_384, 152.8),
    "falcon-h1-0.5b": (0.521, 18_432, 28.70),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name: str) -> None:
    config = translate(name)
    decoder = abstract_decoder(config, Execution(True, True), "bfloat16")
    billions, bytes_per_token, megabytes = SIZES[name]
    assert (parameters(decoder) - parameters(decoder.mtp)) / 1e9 == pytest.approx(billions, rel=5e-3)
    layout = layout_of(config.layers, StateDtypes("float32", "bfloat16"))
    assert layout.bytes_per_token == bytes_per_token
    assert layout.bytes_per_slot / 1e6 == pytest.approx(megabytes, rel=1e-3)


def test_nemotron_3_super_as_published() -> None:
    config = translate("nemotron-3-super-120b-a12b")
    kinds = [(layer.mixer or layer.ffn).kind for layer in config.layers]
    assert {kind: kinds.count(kind) for kind in kinds} == {"mamba2": 40, "moe": 40, "attention": 8}
    assert kinds[:9] == ["mamba2", "moe", "mamba2", "moe", "mamba2", "moe", "mamba2", "attention", "moe"]
    attention, moe = config.layers[7].mixer, config.layers[1].ffn
    assert isinstance(attention, AttentionSpec)
    assert attention.rope is None
    assert isinstance(moe, MoeSpec)
    assert (moe.latent_size, moe.activation.name, moe.num_experts_per_tok) == (1024, "relu2", 22)
    assert (config.mtp_layers[0].mixer, config.mtp_layers[0].ffn) == (attention, moe)
    assert len(config.mtp_layers) == 1


def test_jamba_as_published() -> None:
    config = translate("jamba-1.5-mini")
    assert [number for number, layer in enumerate(config.layers) if layer.mixer.kind == "attention"] == [4, 12, 20, 28]
    assert [layer.ffn.kind for layer in config.layers] == ["dense", "moe"] * 16
    mamba, moe = config.layers[0].mixer, config.layers[1].ffn
    assert mamba == Mamba1Spec(intermediate_size=8192, state_size=16, conv_kernel_size=4, dt_rank=256)
    assert isinstance(moe, MoeSpec)
    assert (moe.scoring, moe.norm_topk_prob) == ("softmax", False)


def test_granite_as_published() -> None:
    config = translate("granite-4.0-h-small")
    attention = [number for number, layer in enumerate(config.layers) if layer.mixer.kind == "attention"]
    assert attention == [5, 15, 25, 35]
    assert config.layers[5].mixer == AttentionSpec(32, 8, 128, rope=None, scale=0.0078125)
    assert (config.embedding_scale, config.logit_scale, config.residual.scale) == (12.0, 1 / 16, 0.22)
    moe = config.layers[0].ffn
    assert isinstance(moe, MoeSpec)
    assert (moe.scoring, moe.norm_topk_prob, moe.shared_intermediate_size) == ("softmax", True, 1536)


def test_falcon_h1_multipliers_that_meet_become_one() -> None:
    config = translate("falcon-h1-0.5b", {"attention_in_multiplier": 2.0})
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    assert isinstance(mixer, AttentionMamba2Spec)
    assert isinstance(ffn, DenseSpec)
    assert mixer.attention.scale == pytest.approx(2.0**2 * 0.390625 / 8)
    assert (mixer.attention_scale, mixer.mamba_scale) == (2 * 0.9375, 0.23570226039551587)
    parts = (0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738)  # z, x, B, C, dt
    assert mixer.mamba.in_scales == tuple(1.25 * part for part in parts)
    assert (ffn.gate_scale, ffn.down_scale) == (0.8838834764831844, 0.5859375)
    assert (config.embedding_scale, config.logit_scale) == (5.656854249492381, 0.0390625)


def test_bamba_as_published() -> None:
    config = translate("bamba-9b")
    attention = config.layers[9].mixer
    assert [layer.mixer.kind for layer in config.layers].count("attention") == 3
    assert attention == AttentionSpec(32, 8, 128, rope=RopeSpec(10000.0, 64))


@pytest.mark.parametrize("limit", [[0.0, math.inf], [0.0, {"__float__": "Infinity"}], [0.0, "Infinity"], None])
def test_an_unlimited_step_is_written_in_several_ways(limit: object) -> None:
    mixer = translate("nemotron-h-8b", {"time_step_limit": limit}).layers[0].mixer
    assert isinstance(mixer, Mamba2Spec)
    assert mixer.time_step_limit == (0.0, math.inf)


def test_files_as_transformers_5_writes_them_mean_the_same() -> None:
    """It adds the defaults of all keys it knows."""
    experts = {"n_routed_experts": 8, "moe_latent_size": None, "n_shared_experts": 1, "mtp_layers_block_type": None}
    assert translate("nemotron-h-8b", experts) == translate("nemotron-h-8b")
    scan = {"use_mambapy": False, "use_associative_scan": True}
    assert translate("jamba-1.5-mini", scan) == translate("jamba-1.5-mini")
    assert translate("bamba-9b", {"z_loss_coefficient": 0.0}) == translate("bamba-9b")


def test_parts_may_be_spelt_out() -> None:
    names = ["mamba", "attention", "mlp", "moe", "linear_attention", "full_attention"]
    changes = {"hybrid_override_pattern": None, "layers_block_type": names, "num_hidden_layers": 6}
    config = translate("nemotron-3-nano-30b-a3b", changes)
    kinds = [(layer.mixer or layer.ffn).kind for layer in config.layers]
    assert kinds == ["mamba2", "attention", "dense", "moe", "mamba2", "attention"]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("nemotron-h-8b", {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern='M-X'"),
        ("nemotron-h-8b", {"hybrid_override_pattern": None}, "'hybrid_override_pattern' or 'layers_block_type'"),
        ("nemotron-h-8b", {"num_hidden_layers": 51}, "num_hidden_layers=51 is not supported, expected 52"),
        ("nemotron-h-8b", {"hybrid_override_pattern": None, "layers_block_type": ["rwkv"]}, "unknown parts ['rwkv']"),
        ("nemotron-h-8b", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ("nemotron-h-8b", {"mlp_bias": True}, "mlp_bias=True"),
        ("nemotron-h-8b", {"attention_bias": True}, "attention_bias=True"),
        ("nemotron-h-8b", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
        ("nemotron-h-8b", {"residual_in_fp32": True}, "residual_in_fp32=True"),
        ("nemotron-h-8b", {"norm_eps": 1e-6}, "layer_norm_epsilon=1e-05 contradicts norm_eps=1e-06"),
        ("nemotron-3-super-120b-a12b", {"mtp_hybrid_override_pattern": "ME"}, "mtp pattern 'ME' is not supported"),
        ("nemotron-3-super-120b-a12b", {"n_shared_experts": 2}, "n_shared_experts=2"),
        ("jamba-1.5-mini", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("bamba-9b", {"mlp_bias": True}, "mlp_bias=True"),
        ("bamba-9b", {"attn_layer_indices": [9, 32]}, "attn_layer_indices=[9, 32]: expected numbers from 0 to 31"),
        ("bamba-9b", {"attn_rotary_emb": 128}, "attn_rotary_emb=128"),
        ("bamba-9b", {"mamba_d_head": 60}, "mamba_n_heads=128 of mamba_d_head=60 do not make up 8192 channels"),
        ("granite-4.0-h-small", {"layer_types": ["rwkv"] * 40}, "layer_types: unknown ['rwkv']"),
        ("granite-4.0-h-small", {"num_hidden_layers": 39}, "num_hidden_layers=39"),
        ("granite-4.0-h-small", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ("granite-4.0-h-small", {"normalization_function": "layernorm"}, "normalization_function='layernorm'"),
        ("falcon-h1-0.5b", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate=True"),
        ("falcon-h1-0.5b", {"projectors_bias": True}, "projectors_bias=True"),
        ("falcon-h1-0.5b", {"mamba_use_mlp": False}, "mamba_use_mlp=False"),
        ("falcon-h1-0.5b", {"ssm_multipliers": [1.0]}, "ssm_multipliers: expected a list of five numbers"),
        ("jamba-1.5-mini", {"sliding_window": 128}, "sliding_window=128"),
        ("jamba-1.5-mini", {"attn_layer_offset": 8}, "attn_layer_offset=8 must lie between 0 and attn_layer_period=8"),
    ],
)
def test_unsupported_options_are_named(name: str, changes: dict, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(name, changes)
    assert str(caught.value).startswith(f"{name}: ")
    assert named in str(caught.value)
