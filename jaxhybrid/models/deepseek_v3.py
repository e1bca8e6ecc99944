"""DeepSeek-V3 and R1 (`deepseek_v3`) and Kimi K2 (`kimi_k2`): latent attention, mixture of experts. arXiv 2412.19437.

With DeepSeek's multi-token-prediction layer, where the file has one.
"""

from jaxhybrid.config import ModelConfig, MoeSpec
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models import deepseek_v2

MODEL_TYPES = ("deepseek_v3", "kimi_k2")

weights = deepseek_v2.weights


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    positions = read.take("max_position_embeddings")
    mixers = (deepseek_v2.latent_spec(read, positions),) * read.take("num_hidden_layers")
    return deepseek_v2.model_config(read, "deepseek_v3", positions, mixers, moe_spec(read))


def moe_spec(read: ConfigReader) -> MoeSpec:
    """Experts chosen by sigmoid and correction bias."""
    read.require("scoring_func", "sigmoid")
    read.require("topk_method", "noaux_tc")
    return deepseek_v2.moe_spec(read, "sigmoid", norm_topk_prob=read.take("norm_topk_prob", default=True))
