"""Mistral 7B (`mistral`): dense attention over a sliding window. arXiv 2310.06825."""

from dataclasses import replace

from jaxhybrid.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.rope_keys import context_length, rope_spec
from jaxhybrid.models.text_model import dense_weights, text_model, two_layer_types

MODEL_TYPES = ("mistral",)


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    read.require("hidden_act", "silu")
    hidden, heads = read.take("hidden_size"), read.take("num_attention_heads")
    head_dim = read.take("head_dim", default=None) or hidden // heads
    positions = read.take("max_position_embeddings")
    rope = rope_spec(read.rope(), head_dim, positions, theta=10000.0)
    attention = AttentionSpec(
        num_attention_heads=heads,
        num_key_value_heads=read.take("num_key_value_heads"),
        head_dim=head_dim,
        rope=rope,
        sliding_window=read.take("sliding_window", default=None),  # null since v0.2
    )
    mixers = {"sliding_attention": attention, "full_attention": replace(attention, sliding_window=None)}
    # The window is of all layers, unless the file lists them (Ministral).
    every = ["sliding_attention"] * read.take("num_hidden_layers")
    kinds = two_layer_types(read, every, ("sliding_attention", "full_attention"))
    ffn = DenseSpec(read.take("intermediate_size"))
    return text_model(
        read,
        model_type="mistral",
        hidden_size=hidden,
        layers=tuple(LayerSpec(mixers[kind], ffn) for kind in kinds),
        max_position_embeddings=context_length(rope, positions),
    )


weights = dense_weights
