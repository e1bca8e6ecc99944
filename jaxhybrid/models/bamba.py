"""Bamba (`bamba`): Mamba-2, a few attention layers with half-rotated heads, dense feed-forwards."""

from jaxhybrid.config import AttentionSpec, DenseSpec, LayerSpec, Mamba2Spec, ModelConfig
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.mamba2_keys import mamba2_spec, mamba2_weights
from jaxhybrid.models.rope_keys import rope_spec
from jaxhybrid.models.text_model import text_model
from jaxhybrid.models.weight_table import WeightTable, trunk_weights

MODEL_TYPES = ("bamba",)

ROTATED = 0.5  # of every head, whatever the file says
POSITIONS = 262144  # of releases whose file names none


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    hidden, layer_count = read.take("hidden_size"), read.take("num_hidden_layers")
    positions = read.take("max_position_embeddings", default=POSITIONS)
    attending = set(read.take("attn_layer_indices", default=None) or ())
    if attending - set(range(layer_count)):
        raise read.error(f"attn_layer_indices={sorted(attending)}: expected numbers from 0 to {layer_count - 1}")
    read.require("hidden_act", "silu")
    read.require("mlp_bias", False)
    read.take("mamba_dt_rank", default=None)  # Mamba-1's: here a step size is a number a head
    ffn = DenseSpec(read.take("intermediate_size"))
    attention = LayerSpec(_attention_spec(read, hidden, positions), ffn)
    mamba = LayerSpec(mamba2_spec(read, read.take("mamba_expand") * hidden), ffn)
    return text_model(
        read,
        model_type="bamba",
        hidden_size=hidden,
        layers=tuple(attention if number in attending else mamba for number in range(layer_count)),
        max_position_embeddings=positions,
    )


def _attention_spec(read: ConfigReader, hidden: int, positions: int) -> AttentionSpec:
    heads, bias = read.take("num_attention_heads"), read.take("attention_bias", default=False)
    head_dim = hidden // heads
    rope = rope_spec(read.rope(), head_dim, positions, theta=10000.0, partial=ROTATED)
    read.require("attn_rotary_emb", rope.rotary_dim)
    return AttentionSpec(heads, read.take("num_key_value_heads"), head_dim, rope, qkv_bias=bias, o_bias=bias)


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes."""
    trunk_weights(table, config, norm="model.final_layernorm")
    for number, place in enumerate(table.layers):
        prefix = f"model.layers.{number}"
        place.norms(prefix, ffn="pre_ff_layernorm")
        place.dense(f"{prefix}.feed_forward", "ffn")
        if isinstance(place.spec.mixer, Mamba2Spec):
            mamba2_weights(place, f"{prefix}.mamba", place.spec.mixer, "mixer")
        else:
            place.attention(f"{prefix}.self_attn")
