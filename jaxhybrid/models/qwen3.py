"""Qwen3 (`qwen3`): dense grouped-query attention, the plain baseline. arXiv 2505.09388."""

from jaxhybrid.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig
from jaxhybrid.models.config_reader import ConfigReader, end_tokens
from jaxhybrid.models.rope_keys import context_length, rope_spec
from jaxhybrid.models.weight_table import WeightTable, trunk_weights

MODEL_TYPES = ("qwen3",)


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    layer_count = read.take("num_hidden_layers")
    head_dim = read.take("head_dim")
    read.require("hidden_act", "silu")
    read.require("attention_bias", False)
    read.require("use_sliding_window", False)
    read.take("sliding_window", default=None)
    read.require("layer_types", ["full_attention"] * layer_count)
    positions = read.take("max_position_embeddings")
    rope = rope_spec(read.rope(), head_dim, positions)
    attention = AttentionSpec(
        num_attention_heads=read.take("num_attention_heads"),
        num_key_value_heads=read.take("num_key_value_heads"),
        head_dim=head_dim,
        rope=rope,
        qk_norm=True,
    )
    return ModelConfig(
        model_type="qwen3",
        vocab_size=read.take("vocab_size"),
        hidden_size=read.take("hidden_size"),
        layers=(LayerSpec(attention, DenseSpec(read.take("intermediate_size"))),) * layer_count,
        rms_norm_eps=read.take("rms_norm_eps"),
        zero_centred_norms=False,
        tie_word_embeddings=read.take("tie_word_embeddings", default=False),
        max_position_embeddings=context_length(rope, positions),
        bos_token_id=read.take("bos_token_id", default=None),
        eos_token_ids=end_tokens(read.take("eos_token_id", default=None)),
    )


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes."""
    trunk_weights(table, config)
    for number, place in enumerate(table.layers):
        prefix = f"model.layers.{number}"
        place.norms(prefix)
        place.attention(f"{prefix}.self_attn")
        place.dense(f"{prefix}.mlp", "ffn")
