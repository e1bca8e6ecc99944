"""DeepSeek-V3.2 (`deepseek_v32`): DeepSeek-V3 whose attention is sparse, the tokens chosen by a lightning indexer."""

from dataclasses import replace

from jaxhybrid.config import IndexerSpec, LatentAttentionSpec, ModelConfig
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models import deepseek_v2, deepseek_v3

MODEL_TYPES = ("deepseek_v32",)

weights = deepseek_v2.weights


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    positions = read.take("max_position_embeddings")
    read.require("indexer_rope_interleave", False)
    mixers = (sparse_spec(read, positions, interleaved=False),) * read.take("num_hidden_layers")
    return deepseek_v2.model_config(read, "deepseek_v32", positions, mixers, deepseek_v3.moe_spec(read))


def sparse_spec(read: ConfigReader, positions: int, interleaved: bool) -> LatentAttentionSpec:
    """Latent attention with an indexer, whose rope has the same frequencies and its own pairing."""
    mixer = deepseek_v2.latent_spec(read, positions)
    if mixer.q_lora_rank is None or mixer.rope is None:
        raise read.error("q_lora_rank=None is not supported: the indexer reads the query latent")
    indexer = IndexerSpec(
        num_heads=read.take("index_n_heads"),
        head_dim=read.take("index_head_dim"),
        top_k=read.take("index_topk"),
        rope=replace(mixer.rope, interleaved=interleaved),
    )
    return replace(mixer, indexer=indexer)
