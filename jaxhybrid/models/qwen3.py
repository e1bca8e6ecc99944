"""Qwen3 (`qwen3`): dense grouped-query attention, the plain baseline. arXiv 2505.09388."""

from jaxhybrid.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.rope_keys import context_length, rope_spec
from jaxhybrid.models.text_model import dense_weights, text_model

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
    return text_model(
        read,
        model_type="qwen3",
        layers=(LayerSpec(attention, DenseSpec(read.take("intermediate_size"))),) * layer_count,
        max_position_embeddings=context_length(rope, positions),
    )


weights = dense_weights
