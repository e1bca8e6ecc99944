"""Falcon-H1 (`falcon_h1`): attention and Mamba-2 side by side in every layer, dense feed-forwards. arXiv 2507.22448.

Its many multipliers (maximal update parametrisation) are factors on linear maps; those that meet become one.
"""

import dataclasses

from jaxhybrid.config import AttentionMamba2Spec, AttentionSpec, DenseSpec, LayerSpec, Mamba2Spec, ModelConfig
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.mamba2_keys import mamba2_spec, mamba2_weights
from jaxhybrid.models.rope_keys import rope_spec
from jaxhybrid.models.text_model import text_model
from jaxhybrid.models.weight_table import WeightTable, trunk_weights

MODEL_TYPES = ("falcon_h1",)


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    hidden, positions = read.take("hidden_size"), read.take("max_position_embeddings")
    read.require("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        read.require(name, False)
    read.require("attn_layer_indices", None)
    read.require("mamba_use_mlp", True)
    attention_in = float(read.take("attention_in_multiplier", default=1.0))
    mixer = AttentionMamba2Spec(
        attention=_attention_spec(read, hidden, positions, attention_in),
        mamba=_mamba_spec(read, hidden),
        # Values are linear in attention's input, so its multiplier may as well follow them.
        attention_scale=attention_in * read.take("attention_out_multiplier", default=1.0),
        mamba_scale=float(read.take("ssm_out_multiplier", default=1.0)),
    )
    gate_scale, down_scale = read.take("mlp_multipliers", default=None) or (1.0, 1.0)
    ffn = DenseSpec(read.take("intermediate_size"), gate_scale=float(gate_scale), down_scale=float(down_scale))
    return text_model(
        read,
        model_type="falcon_h1",
        hidden_size=hidden,
        layers=(LayerSpec(mixer, ffn),) * read.take("num_hidden_layers"),
        max_position_embeddings=positions,
        embedding_scale=float(read.take("embedding_multiplier", default=1.0)),
        logit_scale=float(read.take("lm_head_multiplier", default=1.0)),
    )


def _attention_spec(read: ConfigReader, hidden: int, positions: int, attention_in: float) -> AttentionSpec:
    """Scores carry the input's multiplier twice, by queries and keys, and the keys' own once."""
    heads = read.take("num_attention_heads")
    head_dim = read.take("head_dim", default=None) or hidden // heads
    return AttentionSpec(
        num_attention_heads=heads,
        num_key_value_heads=read.take("num_key_value_heads", default=None) or heads,
        head_dim=head_dim,
        rope=rope_spec(read.rope(), head_dim, positions, theta=10000.0),
        scale=attention_in**2 * read.take("key_multiplier", default=1.0) * head_dim**-0.5,
    )


def _mamba_spec(read: ConfigReader, hidden: int) -> Mamba2Spec:
    expanded, width = read.take("mamba_expand", default=2) * hidden, read.take("mamba_d_ssm", nullable=True)
    norm = read.take("mamba_rms_norm", default=False)
    norm_first = read.take("mamba_norm_before_gate", default=True)
    if norm and norm_first:
        raise read.error("mamba_norm_before_gate=True is not supported with mamba_rms_norm=True, expected False")
    multipliers = read.take("ssm_multipliers", default=None) or (1.0,) * 5
    whole = read.take("ssm_in_multiplier", default=1.0)
    z, x, B, C, dt = (float(whole * part) for part in multipliers)
    return dataclasses.replace(mamba2_spec(read, width or expanded, norm), in_scales=(z, x, B, C, dt))


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes."""
    trunk_weights(table, config, norm="model.final_layernorm")
    for number, place in enumerate(table.layers):
        prefix = f"model.layers.{number}"
        place.norms(prefix, ffn="pre_ff_layernorm")
        place.dense(f"{prefix}.feed_forward", "ffn")
        assert isinstance(place.spec.mixer, AttentionMamba2Spec)
        mamba2_weights(place, f"{prefix}.mamba", place.spec.mixer.mamba, "mixer", "mamba")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            place.add(f"{prefix}.self_attn.{name}.weight", "mixer", "attention", name, "weight")
