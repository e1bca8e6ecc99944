"""What nearly every published config.json spells alike, and the plainest weight table."""

from collections.abc import Sequence
from typing import Any

from jaxhybrid.config import ModelConfig
from jaxhybrid.config_reader import ConfigReader, end_tokens
from jaxhybrid.models.weight_table import WeightTable, trunk_weights


def text_model(read: ConfigReader, **fields: Any) -> ModelConfig:
    """A ModelConfig of `fields`, the rest from the keys most families use. Raises ConfigError for a missing one."""
    for name in ("vocab_size", "hidden_size", "rms_norm_eps"):
        if name not in fields:
            fields[name] = read.take(name)
    fields.setdefault("zero_centred_norms", False)
    return ModelConfig(
        tie_word_embeddings=read.take("tie_word_embeddings", default=False),
        bos_token_id=read.take("bos_token_id", default=None),
        eos_token_ids=end_tokens(read.take("eos_token_id", default=None)),
        **fields,
    )


def two_layer_types(read: ConfigReader, default: Sequence[str], kinds: tuple[str, str]) -> list[str]:
    """`layer_types`, one of two kinds for each layer; `default` where the file lists none. Raises ConfigError."""
    types = read.take("layer_types", default=None) or list(default)
    if len(types) != len(default) or not set(types) <= set(kinds):
        raise read.error(f"layer_types: expected {len(default)} of {' or '.join(kinds)}, got {types}")
    return types


def dense_weights(table: WeightTable, config: ModelConfig) -> None:
    """Attention and a dense feed-forward in every layer, under the names of Llama."""
    trunk_weights(table, config)
    for number, place in enumerate(table.layers):
        prefix = f"model.layers.{number}"
        place.norms(prefix)
        place.attention(f"{prefix}.self_attn")
        place.dense(f"{prefix}.mlp", "ffn")
