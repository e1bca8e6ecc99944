"""Each family's translation of a published config.json, and its table of tensor names."""

import copy
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxhybrid as jh
from jaxhybrid import models
from jaxhybrid.checkpoint.dequantise import DequantisedFolder
from jaxhybrid.checkpoint.safetensors_folder import CheckpointFolder
from jaxhybrid.config import AttentionSpec, DenseSpec, ModelConfig, MoeSpec, RopeSpec
from jaxhybrid.config_reader import INERT_KEYS, NEUTRAL_VALUES
from jaxhybrid.errors import ConfigError
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.decoder import abstract_decoder
from jaxhybrid.models import FAMILIES, family_of
from jaxhybrid.models.weight_table import WeightTable
from jaxhybrid.state.arrays import pool_arrays
from jaxhybrid.state.batch import BatchAddress

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
NAMES = sorted(folder.parent.name for folder in GOLDENS.glob("*/golden.npz"))
PUBLISHED = {
    "kimi_linear": "kimi-linear-48b-a3b",
    "qwen3_next": "qwen3-next-80b-a3b",
    "qwen3": "qwen3-8b",
    "qwen3_moe": "qwen3-30b-a3b",
    "llama": "llama-3.1-8b",
    "mistral": "mistral-7b-v0.1",
    "qwen2": "qwen2.5-7b",
    "gemma3_text": "gemma-3-1b",
    "gemma3": "gemma-3-4b",
    "gpt_oss": "gpt-oss-20b",
    "nemotron_h": "nemotron-3-super-120b-a12b",
    "jamba": "jamba-1.5-mini",
    "bamba": "bamba-9b",
    "granitemoehybrid": "granite-4.0-h-small",
    "falcon_h1": "falcon-h1-0.5b",
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
    "deepseek_v32": "deepseek-v3.2",
    "glm_moe_dsa": "glm-5",
    "deepseek_v4": "deepseek-v4-flash",
    "qwen3_5": "qwen3.5-0.8b",
    "qwen3_5_text": "qwen3.5-0.8b",
    "qwen3_5_moe": "qwen3.5-35b-a3b",
    "qwen3_5_moe_text": "qwen3.5-35b-a3b",
    "kimi_k3": "kimi-k3",
}
WHERE = "here/config.json"


def published(model_type: str) -> dict:
    values = json.loads((ROOT / "configs" / f"{PUBLISHED[model_type]}.json").read_text())
    return values["text_config"] if model_type in ("qwen3_5_text", "qwen3_5_moe_text") else values


def translate(values: dict) -> ModelConfig:
    return models.translate(values, WHERE)


def refused(values: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        translate(values)
    return str(caught.value)


def test_every_family_has_a_published_configuration() -> None:
    assert set(FAMILIES) == set(PUBLISHED)


@pytest.mark.parametrize(
    ("model_type", "billions"),
    [
        ("kimi_linear", (47, 50)),
        ("qwen3_next", (78, 82)),
        ("qwen3", (8.19, 8.192)),
        ("qwen3_moe", (30.5, 30.6)),
        ("llama", (8.03, 8.031)),
        ("mistral", (7.241, 7.242)),
        ("qwen2", (7.61, 7.62)),
        ("gemma3_text", (0.9998, 0.9999)),
        ("gemma3", (3.88, 3.881)),
        ("gpt_oss", (20.9, 20.92)),
        ("qwen3_5", (0.87, 0.878)),
        ("qwen3_5_moe", (35.9, 36.0)),
        ("kimi_k3", (2770, 2790)),
    ],
)
def test_a_published_configuration_has_the_published_number_of_parameters(
    model_type: str, billions: tuple[float, float]
) -> None:
    decoder = abstract_decoder(translate(published(model_type)), Execution(True, True), "bfloat16")
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.split(decoder)[1]))
    assert billions[0] < count / 1e9 < billions[1]


def test_kimi_linear_as_published() -> None:
    config = translate(published("kimi_linear"))
    latent = [number for number, layer in enumerate(config.layers, 1) if layer.mixer.kind == "latent_attention"]
    assert latent == [4, 8, 12, 16, 20, 24, 27]
    assert [layer.ffn.kind for layer in config.layers] == ["dense", *["moe"] * 26]
    moe = config.layers[1].ffn
    assert isinstance(moe, MoeSpec)
    assert (moe.scoring, moe.routed_scaling_factor, moe.shared_expert_gate) == ("sigmoid", 2.446, False)
    assert not config.zero_centred_norms


def test_qwen3_next_as_published() -> None:
    config = translate(published("qwen3_next"))
    kinds = [layer.mixer.kind for layer in config.layers]
    assert kinds == ["gated_delta_net", "gated_delta_net", "gated_delta_net", "attention"] * 12
    attention = config.layers[3].mixer
    assert isinstance(attention, AttentionSpec)
    assert (attention.rope, attention.output_gate, attention.qk_norm) == (RopeSpec(1e7, 64), True, True)
    assert config.zero_centred_norms


def test_qwen3_as_published() -> None:
    config = translate(published("qwen3"))
    assert set(config.layers) == {config.layers[0]}
    attention = config.layers[0].mixer
    assert isinstance(attention, AttentionSpec)
    assert (attention.rope, attention.output_gate, attention.qk_norm) == (RopeSpec(1e6, 128), False, True)


@pytest.mark.parametrize("value", ["gpt2", None])
def test_an_unknown_model_type_is_named_with_the_known_ones(value: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        family_of({"model_type": value} if value else {}, WHERE)
    known = ", ".join(sorted(FAMILIES))
    assert str(caught.value) == f"{WHERE}: unknown model_type '{value}', expected one of {known}"


@pytest.mark.parametrize("model_type", sorted(PUBLISHED))
def test_unknown_keys_are_named(model_type: str) -> None:
    message = refused(published(model_type) | {"attention_sinks": True})
    assert message.startswith(f"{WHERE}: unknown keys attention_sinks")


DEEPSEEK_OPTIONAL = {
    *("attention_bias", "bos_token_id", "eos_token_id", "hidden_act", "moe_layer_freq", "norm_topk_prob"),
    *("num_key_value_heads", "scoring_func", "tie_word_embeddings"),
}
WHOLE_OPTIONAL = {"tie_word_embeddings", "vision_start_token_id", "vision_end_token_id"}
QWEN3_5_OPTIONAL = {
    *("attention_bias", "attn_output_gate", "eos_token_id", "full_attention_interval", "hidden_act", "layer_types"),
    *("mamba_ssm_dtype", "mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    *("partial_rotary_factor", "tie_word_embeddings"),
}

# Keys a published file may leave out; keys that say nothing of the forward pass aside.
OPTIONAL = {
    "nemotron_h": {
        *("mlp_bias", "attention_bias", "use_bias", "use_conv_bias", "mamba_proj_bias", "residual_in_fp32"),
        *("mlp_hidden_act", "mamba_hidden_act", "sliding_window", "rope_theta", "partial_rotary_factor", "chunk_size"),
        *("expand", "mamba_ssm_cache_dtype", "time_step_min", "time_step_max", "time_step_floor", "num_hidden_layers"),
        "time_step_limit",
        *(
            "n_shared_experts",
            "moe_shared_expert_overlap",
            "moe_latent_size",
            "norm_topk_prob",
            "n_group",
            "topk_group",
        ),
        *("routed_scaling_factor", "num_nextn_predict_layers", "mtp_hybrid_override_pattern", "tie_word_embeddings"),
        *("layer_norm_epsilon", "norm_eps", "bos_token_id", "eos_token_id"),
    },
    "bamba": {
        *("attn_layer_indices", "hidden_act", "mlp_bias", "attention_bias", "attn_rotary_emb", "rope_theta"),
        *("rope_scaling", "mamba_chunk_size", "mamba_d_head", "mamba_n_groups", "mamba_conv_bias", "mamba_proj_bias"),
        *("tie_word_embeddings", "bos_token_id", "eos_token_id", "max_position_embeddings", "mamba_dt_rank"),
    },
    "granitemoehybrid": {
        *("hidden_act", "normalization_function", "attention_bias", "position_embedding_type", "num_key_value_heads"),
        *("rope_theta", "rope_scaling", "attention_multiplier", "embedding_multiplier", "logits_scaling"),
        *("residual_multiplier", "num_hidden_layers", "mamba_chunk_size", "mamba_d_head", "mamba_n_groups"),
        *("mamba_conv_bias", "mamba_proj_bias", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
    },
    "falcon_h1": {
        *("hidden_act", "attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias", "attn_layer_indices"),
        *("mamba_use_mlp", "attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "mlp_multipliers"),
        *("ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier", "embedding_multiplier", "lm_head_multiplier"),
        *("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "mamba_expand", "mamba_rms_norm"),
        *("mamba_norm_before_gate", "mamba_chunk_size", "mamba_d_head", "mamba_n_groups", "mamba_conv_bias"),
        *("tie_word_embeddings", "bos_token_id", "eos_token_id"),
    },
    "jamba": {
        *("hidden_act", "sliding_window", "mamba_dt_rank", "mamba_conv_bias", "mamba_proj_bias", "tie_word_embeddings"),
        *("bos_token_id", "eos_token_id"),
    },
    "kimi_linear": {
        *("head_dim", "num_key_value_heads", "q_lora_rank", "mla_use_nope", "first_k_dense_replace", "moe_layer_freq"),
        *("num_shared_experts", "moe_router_activation_func", "moe_renormalize", "routed_scaling_factor"),
        *("use_grouped_topk", "num_expert_group", "topk_group", "num_nextn_predict_layers", "hidden_act"),
        *("rope_theta", "rope_scaling", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
    },
    "qwen3_next": {
        *("full_attention_interval", "attention_bias", "partial_rotary_factor", "rope_scaling", "decoder_sparse_step"),
        *("mlp_only_layers", "norm_topk_prob", "hidden_act", "use_sliding_window", "tie_word_embeddings"),
        *("bos_token_id", "eos_token_id"),
    },
    "qwen3": {
        *("attention_bias", "rope_scaling", "hidden_act", "use_sliding_window", "sliding_window"),
        *("tie_word_embeddings", "bos_token_id", "eos_token_id"),
    },
    "qwen3_moe": {
        *("attention_bias", "rope_scaling", "hidden_act", "use_sliding_window", "sliding_window", "mlp_only_layers"),
        *("decoder_sparse_step", "norm_topk_prob", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
    },
    "llama": {
        *("attention_bias", "mlp_bias", "rope_scaling", "rope_theta", "hidden_act", "num_key_value_heads"),
        *("tie_word_embeddings", "bos_token_id", "eos_token_id"),
    },
    "qwen2": {
        *("hidden_act", "rope_theta", "use_sliding_window", "sliding_window", "tie_word_embeddings", "bos_token_id"),
        "eos_token_id",
    },
    "mistral": {
        *("hidden_act", "rope_theta", "sliding_window", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
    },
    "gpt_oss": {
        *("attention_bias", "hidden_act", "initial_context_length", "layer_types", "max_position_embeddings"),
        *("experts_per_token", "num_experts_per_tok", "rope_scaling", "swiglu_limit", "tie_word_embeddings"),
        "eos_token_id",
    },
    # Released files leave most of it out.
    "gemma3_text": set(published("gemma3_text")) - {"hidden_size", "intermediate_size", "num_hidden_layers"},
    "gemma3": {
        *("boi_token_index", "eoi_token_index", "eos_token_id", "image_token_index", "mm_tokens_per_image"),
        "vision_config",
    },
    "deepseek_v2": DEEPSEEK_OPTIONAL | {"rope_scaling"},
    "deepseek_v3": DEEPSEEK_OPTIONAL | {"rope_scaling", "topk_method", "num_nextn_predict_layers"},
    "kimi_k2": DEEPSEEK_OPTIONAL | {"rope_scaling", "topk_method", "num_nextn_predict_layers"},
    "deepseek_v32": DEEPSEEK_OPTIONAL | {"rope_scaling", "topk_method", "num_nextn_predict_layers"},
    "glm_moe_dsa": {
        *(*DEEPSEEK_OPTIONAL, "topk_method", "num_nextn_predict_layers", "head_dim", "qk_head_dim", "rope_interleave"),
        *("indexer_rope_interleave", "mlp_layer_types"),
    },
    "deepseek_v4": (DEEPSEEK_OPTIONAL | {"rope_scaling", "topk_method", "num_nextn_predict_layers"})
    - {"moe_layer_freq"},
    "qwen3_5": WHOLE_OPTIONAL,
    "qwen3_5_text": QWEN3_5_OPTIONAL,
    "qwen3_5_moe": WHOLE_OPTIONAL,
    "qwen3_5_moe_text": QWEN3_5_OPTIONAL,
    "kimi_k3": {
        *("image_placeholder", "vision_config"),
        *("tie_word_embeddings", "bos_token_id", "eos_token_id"),
    },
}


@pytest.mark.parametrize("model_type", sorted(PUBLISHED))
def test_every_missing_key_is_named_or_has_a_default(model_type: str) -> None:
    values = published(model_type)
    for key in values.keys() - {"model_type"}:
        left = {name: value for name, value in values.items() if name != key}
        if key in OPTIONAL[model_type] | INERT_KEYS | NEUTRAL_VALUES.keys():
            assert translate(left).hidden_size == values.get("text_config", values)["hidden_size"]
        else:
            message = refused(left)
            assert message.startswith(f"{WHERE}: ")
            assert repr("rope_theta" if key == "rope_parameters" else key) in message


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False"),
        ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
        ("kimi_linear", {"num_key_value_heads": 8}, "num_key_value_heads=8"),
        ("kimi_linear", {"rope_scaling": {"type": "yarn"}}, "rope_type='yarn'"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3_next", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 47}, "layer_types"),
        ("qwen3_next", {"layer_types": ["mamba"] * 48}, "layer_types"),
        ("qwen3", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 36}, "layer_types="),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "gain": 4.0}}, "unknown keys gain"),
        ("kimi_linear", {"num_experts_per_tok": 4}, "num_experts_per_token=8 contradicts num_experts_per_tok=4"),
        ("kimi_linear", {"n_shared_experts": 2}, "num_shared_experts=1 contradicts n_shared_experts=2"),
        ("kimi_linear", {"max_position_embeddings": 9}, "model_max_length=1048576 contradicts"),
        ("qwen3", {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta=5.0 contradicts rope_theta=1000000"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
        ("qwen3_5_moe_text", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ("qwen3_5", {"tie_word_embeddings": False}, "tie_word_embeddings=True contradicts False outside of it"),
        ("glm_moe_dsa", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype='bfloat16'"),
        ("kimi_k3", {"is_decoder": True}, "is_decoder=True"),
        ("kimi_k3", {"eos_token_id": 7}, "eos_token_id=163586 contradicts 7 outside of it"),
    ],
)
def test_unsupported_and_contradictory_options_are_named(model_type: str, changes: dict, named: str) -> None:
    message = refused(published(model_type) | changes)
    assert message.startswith(f"{WHERE}: ")
    assert named in message


@pytest.mark.parametrize(
    "changes",
    [
        {"kda_layers": [1, 2, 3]},
        {"full_attn_layers": [3, 4, 8, 12, 16, 20, 24, 27]},
        {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27, 28]},
    ],
    ids=["a layer of neither", "a layer of both", "a layer too many"],
)
def test_kimi_layer_lists_must_share_out_the_layers(changes: dict) -> None:
    values = published("kimi_linear")
    values["linear_attn_config"] |= changes
    message = refused(values)
    assert message.startswith(
        f"{WHERE}: linear_attn_config: kda_layers and full_attn_layers must share out layers 1 to"
    )


def test_unknown_keys_of_the_nested_kimi_object_are_named() -> None:
    values = published("kimi_linear")
    values["linear_attn_config"]["window"] = 4
    assert refused(values).startswith(f"{WHERE}: linear_attn_config: unknown keys window")


def test_end_tokens_and_layer_types_spelt_out() -> None:
    assert translate(published("qwen3") | {"eos_token_id": [5, 7], "bos_token_id": 3}).eos_token_ids == (5, 7)
    assert translate(published("qwen3_next") | {"eos_token_id": 5}).eos_token_ids == (5,)
    assert translate(published("kimi_linear")).eos_token_ids == (163586,)
    assert translate(published("kimi_linear") | {"eos_token_id": None}).eos_token_ids == ()
    types = ["linear_attention", "full_attention"] * 24
    config = translate(published("qwen3_next") | {"layer_types": types})
    assert [layer.mixer.kind for layer in config.layers] == ["gated_delta_net", "attention"] * 24
    sparse = translate(published("qwen3_next") | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert [isinstance(layer.ffn, DenseSpec) for layer in sparse.layers[:4]] == [True, True, True, False]


# The table of tensor names


def checkpoint_names(folder: Path) -> set[str]:
    return set(DequantisedFolder.over(CheckpointFolder.open(folder)).tensors)


@pytest.mark.parametrize("execution", [Execution(False, False), Execution(True, True)], ids=["separate", "stacked"])
@pytest.mark.parametrize("name", NAMES)
def test_the_table_names_every_tensor_of_a_checkpoint_and_no_other(name: str, execution: Execution) -> None:
    values = json.loads((GOLDENS / name / "config.json").read_text())
    config = translate(copy.deepcopy(values))
    table = WeightTable(config, execution)
    family_of(values, WHERE).weights(table, config)
    ignored = [re.compile(pattern) for pattern in table.ignored]
    names = {each for each in checkpoint_names(GOLDENS / name) if not any(it.fullmatch(each) for it in ignored)}
    assert {rule.name for rule in table.rules} == names


@pytest.mark.parametrize("name", ["kimi_linear_gated", "qwen3_next_b"])
def test_every_tensor_changes_what_the_model_says(name: str) -> None:
    """Each place of the table in turn gets noise; prompts are long enough to reach every expert."""
    model = jh.load_model(GOLDENS / name)
    table = WeightTable(model.config, Execution.for_platform("cpu"))
    family_of({"model_type": model.config.model_type}, WHERE).weights(table, model.config)
    with np.load(GOLDENS / name / "golden.npz") as arrays:
        ids = jnp.asarray(arrays["input_ids"][:, :49])
    leaves = dict(nnx.to_flat_state(model.parameters))
    run = jax.jit(lambda parameters: _both_logits(model, parameters, ids))
    trunk, further = map(np.asarray, run(model.parameters))
    rng = np.random.default_rng(0)
    for rule in table.rules:
        changed = np.array(leaves[rule.path][...])
        place = changed[rule.index]
        changed[rule.index] = place + rng.normal(size=place.shape) * max(float(place.std()), 0.2)
        parameters = nnx.from_flat_state(
            [(path, leaf.replace(jnp.asarray(changed)) if path == rule.path else leaf) for path, leaf in leaves.items()]
        )
        trunk_now, further_now = map(np.asarray, run(parameters))
        where = f"{rule.name} into {rule.path} at {rule.index}"
        assert np.isfinite(trunk_now).all(), where
        if rule.path[0] == "mtp":
            assert np.array_equal(trunk_now, trunk), where
            assert np.abs(further_now - further).max() > 1e-2, where
        else:
            assert np.abs(trunk_now - trunk).max() > 1e-2, where


def _both_logits(model: jh.Model, parameters: nnx.State, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the trunk, and of the first multi-token-prediction layer (empty where there is none)."""
    decoder = nnx.merge(model.graph, parameters)
    rows, length = ids.shape
    slots = 1 + jnp.arange(rows, dtype=jnp.int32)
    address = BatchAddress(jnp.zeros(rows, jnp.int32), jnp.full(rows, length - 1), slots[:, None], slots, slots)
    stream, _ = decoder.stream(ids[:, :-1], pool_arrays(decoder.layout, rows + 1, rows + 1, 64), address)
    logits = decoder.logits(decoder.outputs(stream))
    if not model.config.mtp_layers:
        return logits, jnp.zeros(0)
    state = pool_arrays(decoder.mtp_layout, rows + 1, rows + 1, 64)
    return logits, decoder.predict_further(ids[:, 1:], stream, state, address)[0]
