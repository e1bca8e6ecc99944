"""Llama 2, 3 and their kin (`llama`): dense grouped-query attention. arXiv 2407.21783."""

from jaxhybrid.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.rope_keys import context_length, rope_spec
from jaxhybrid.models.text_model import dense_weights, text_model

MODEL_TYPES = ("llama",)


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    read.require("hidden_act", "silu")
    read.require("mlp_bias", False)
    read.require("rope_interleaved", False)
    hidden, heads = read.take("hidden_size"), read.take("num_attention_heads")
    head_dim = read.take("head_dim", default=None) or hidden // heads
    positions = read.take("max_position_embeddings")
    bias = read.take("attention_bias", default=False)
    rope = rope_spec(read.rope(), head_dim, positions, theta=10000.0)
    attention = AttentionSpec(
        num_attention_heads=heads,
        num_key_value_heads=read.take("num_key_value_heads", default=None) or heads,
        head_dim=head_dim,
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
    )
    layer = LayerSpec(attention, DenseSpec(read.take("intermediate_size")))
    return text_model(
        read,
        model_type="llama",
        hidden_size=hidden,
        layers=(layer,) * read.take("num_hidden_layers"),
        max_position_embeddings=context_length(rope, positions),
    )


weights = dense_weights
