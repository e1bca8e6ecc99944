"""Qwen2 and Qwen2.5 (`qwen2`): dense grouped-query attention with biases on q, k and v. arXiv 2407.10671."""

from jaxhybrid.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.rope_keys import context_length, rope_spec
from jaxhybrid.models.text_model import dense_weights, text_model

MODEL_TYPES = ("qwen2",)


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    read.require("hidden_act", "silu")
    read.require("use_sliding_window", False)
    read.take("sliding_window", default=None)  # of no effect without use_sliding_window
    layer_count = read.take("num_hidden_layers")
    read.require("layer_types", ["full_attention"] * layer_count)
    hidden, heads = read.take("hidden_size"), read.take("num_attention_heads")
    head_dim = read.take("head_dim", default=None) or hidden // heads
    positions = read.take("max_position_embeddings")
    rope = rope_spec(read.rope(), head_dim, positions, theta=10000.0)
    attention = AttentionSpec(heads, read.take("num_key_value_heads"), head_dim, rope, qkv_bias=True)
    return text_model(
        read,
        model_type="qwen2",
        hidden_size=hidden,
        layers=(LayerSpec(attention, DenseSpec(read.take("intermediate_size"))),) * layer_count,
        max_position_embeddings=context_length(rope, positions),
    )


weights = dense_weights
