"""What the published Qwen3.5 and Kimi K3 configurations say, read layer by layer."""

import json
import math
from pathlib import Path

import jax
import pytest
from flax import nnx

from jaxhybrid import models
from jaxhybrid.config import (
    ActivationSpec,
    AttentionResidual,
    AttentionSpec,
    DynamicScaling,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LatentAttentionSpec,
    ModelConfig,
    MoeSpec,
    RopeSpec,
)
from jaxhybrid.errors import ConfigError
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.decoder import abstract_decoder
from jaxhybrid.layers.segments import plan_segments
from jaxhybrid.layers.vision import VisionTower

CONFIGS = Path(__file__).parents[2] / "configs"


def translate(name: str, part: str | None = None, **changes: object) -> ModelConfig:
    """`changes` of the file's nested object `part`."""
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    if part is not None:
        values[part] |= changes
    return models.translate(values, name)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3.5-9b", 9.65), ("qwen3.5-27b", 27.78), ("qwen3.5-397b-a17b", 403.4)]
)
def test_other_sizes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    decoder = abstract_decoder(translate(name), Execution(True, True), "bfloat16")
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.split(decoder)[1]))
    assert count / 1e9 == pytest.approx(billions, rel=0.005)


def test_qwen3_5_as_published() -> None:
    config = translate("qwen3.5-27b")
    assert [layer.mixer.kind for layer in config.layers] == [*["gated_delta_net"] * 3, "attention"] * 16
    attention, delta = config.layers[3].mixer, config.layers[0].mixer
    assert isinstance(attention, AttentionSpec)
    assert isinstance(delta, GatedDeltaNetSpec)
    assert attention.rope == RopeSpec(1e7, 64, sections=(11, 11, 10))
    assert (attention.output_gate, attention.qk_norm, config.zero_centred_norms) == (True, True, True)
    assert (delta.num_key_heads, delta.num_value_heads) == (16, 48)
    assert [layer.mixer for layer in config.mtp_layers] == [attention]
    vision = config.vision
    assert vision is not None
    assert (vision.out_hidden_size, vision.patch_features, vision.patches_per_token) == (5120, 1536, 4)
    assert (config.model_type, config.eos_token_ids) == ("qwen3_5", (248044,))


def test_qwen3_5_experts_in_trunk_and_prediction_layer() -> None:
    config = translate("qwen3.5-397b-a17b")
    moe = config.layers[0].ffn
    assert isinstance(moe, MoeSpec)
    assert (moe.num_experts, moe.num_experts_per_tok, moe.scoring, moe.norm_topk_prob) == (512, 10, "softmax", True)
    assert config.mtp_layers[0].ffn == moe
    assert config.model_type == "qwen3_5_moe"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"deepstack_visual_indexes": [3]}, "deepstack_visual_indexes=[3]"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_position_embeddings": 2305}, "num_position_embeddings must be a square, got 2305"),
        ({"windows": 4}, "unknown keys windows"),
    ],
)
def test_other_towers_are_refused(changes: dict, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate("qwen3.5-0.8b", "vision_config", **changes)
    assert named in str(caught.value)


def test_mrope_is_interleaved_and_not_dynamic() -> None:
    rope = {"rope_theta": 1e4, "mrope_section": [11, 11, 10], "mrope_interleaved": False}
    with pytest.raises(ConfigError, match="mrope_interleaved=False is not supported"):
        translate("qwen3.5-0.8b", "text_config", rope_parameters=rope)
    with pytest.raises(ConfigError, match="dynamic rope scaling goes by one position"):
        RopeSpec(1e4, 64, scaling=DynamicScaling(2.0, 1024), sections=(11, 11, 10))


def test_kimi_k3_as_published() -> None:
    config = translate("kimi-k3")
    latent = [number for number, layer in enumerate(config.layers, 1) if layer.mixer.kind == "latent_attention"]
    assert latent == [*range(4, 93, 4), 93]
    assert [number for number, layer in enumerate(config.layers) if layer.seals_block] == list(range(0, 93, 12))
    assert config.residual == AttentionResidual()
    delta, attention, moe = config.layers[0].mixer, config.layers[3].mixer, config.layers[1].ffn
    assert delta == KimiDeltaSpec(96, 128, 4, gate_lower_bound=-5.0, full_rank_gate=True)
    assert isinstance(attention, LatentAttentionSpec)
    assert (attention.output_gate, attention.q_lora_rank, attention.rope) == (True, 1536, None)
    assert isinstance(moe, MoeSpec)
    assert (moe.latent_size, moe.latent_norm, moe.shared_intermediate_size) == (3584, True, 6144)
    assert moe.activation == ActivationSpec("situ", beta=4.0, linear_beta=25.0)


def test_kimi_k3_tower_as_published() -> None:
    vision = translate("kimi-k3").vision
    assert vision is not None
    assert (vision.depth, vision.hidden_size, vision.attention_size, vision.head_dim) == (27, 1024, 1536, 128)
    assert (vision.patch_features, vision.patches_per_token, vision.out_hidden_size) == (588, 4, 7168)
    assert (vision.placeholder_ids, vision.norm, vision.norm_eps) == ((163605,), "rms", 2**-23)
    tower = nnx.split(nnx.eval_shape(lambda: VisionTower(vision, "bfloat16")))[1]
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tower))
    assert count == 401_214_464 + 46_144_512  # MoonViT and projector


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_type": "layernorm"}, "norm_type='layernorm' is not supported"),
        ({"pos_emb_interpolation_mode": "bicubic"}, "pos_emb_interpolation_mode='bicubic'"),
        ({"init_pos_emb_width": 32}, "init_pos_emb_width=32 is not supported, expected 64"),
        ({"merge_kernel_size": [2, 1]}, "merge_kernel_size=[2, 1] is not supported, expected [2, 2]"),
        ({"text_hidden_size": 7}, "text_hidden_size=7 is not supported, expected 7168"),
        ({"linear_bias": True}, "linear_bias=True"),
        ({"vt_num_attention_heads": 7}, "a tower's heads must have a multiple of 4 channels, got 1536 for 7"),
        ({"windows": 4}, "unknown keys windows"),
    ],
)
def test_other_towers_of_kimi_k3_are_refused(changes: dict, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate("kimi-k3", "vision_config", **changes)
    assert named in str(caught.value)


def test_kimi_k3_without_its_tower_is_a_text_model() -> None:
    values = json.loads((CONFIGS / "kimi-k3.json").read_text())
    del values["vision_config"]
    assert models.translate(values, "kimi-k3").vision is None


def test_kimi_k3_layers_repeat_every_twelve() -> None:
    plans = plan_segments(translate("kimi-k3").layers, scan=True)
    assert max((plan.layers, len(plan.pattern)) for plan in plans) == (84, 12)
    assert sum(len(plan.pattern) for plan in plans) <= 20  # layers to compile, of 93


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu' is not supported, expected 'situ'"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"mla_use_nope": False}, "mla_use_nope=False"),
        ({"sinks": True}, "unknown keys sinks"),
        ({"add_cross_attention": True}, "text_config: add_cross_attention=True is not supported, expected False"),
    ],
)
def test_other_forms_of_kimi_k3_are_refused(changes: dict, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate("kimi-k3", "text_config", **changes)
    assert named in str(caught.value)
