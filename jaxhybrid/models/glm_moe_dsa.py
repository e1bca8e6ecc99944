"""GLM-5 (`glm_moe_dsa`): latent attention made sparse by an indexer, which from GLM-5.2 on several layers share."""

from dataclasses import replace

from jaxhybrid.config import ModelConfig
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models import deepseek_v2, deepseek_v3, deepseek_v32

MODEL_TYPES = ("glm_moe_dsa",)

weights = deepseek_v2.weights

_KINDS = {"F": "full", "S": "shared"}


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    positions = read.take("max_position_embeddings")
    read.require("indexer_rope_interleave", True)
    full = deepseek_v32.sparse_spec(read, positions, interleaved=True)
    read.require("moe_router_dtype", "float32")
    kinds = _indexer_types(read, read.take("num_hidden_layers"))
    mixers = [full if kind == "full" else replace(full, indexer="shared") for kind in kinds]
    return deepseek_v2.model_config(read, "glm_moe_dsa", positions, mixers, deepseek_v3.moe_spec(read))


def _indexer_types(read: ConfigReader, layers: int) -> list[str]:
    """ "full" or "shared" for each layer: listed, as a pattern of F and S, or every so many layers after the first."""
    every, offset = read.take("index_topk_freq", default=1), read.take("index_skip_topk_offset", default=2)
    kinds = ["full" if max(number - offset + 1, 0) % every == 0 else "shared" for number in range(layers)]
    if pattern := read.take("index_topk_pattern", default=None):
        kinds = [_KINDS.get(kind, kind) for kind in pattern]
    kinds = read.take("indexer_types", default=None) or kinds
    # Whether drafts further ahead look for tokens anew: of speed, not of what is predicted first.
    read.take("index_share_for_mtp_iteration", default=None)
    if len(kinds) != layers or kinds[0] != "full" or set(kinds) - {"full", "shared"}:
        raise read.error(f"indexer_types: expected full or shared for each of {layers} layers, full first, got {kinds}")
    return kinds
