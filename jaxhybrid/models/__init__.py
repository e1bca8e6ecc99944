"""Model families: each file turns a published config.json into a ModelConfig and names the published tensors."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxhybrid.config import ModelConfig
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.errors import ConfigError
from jaxhybrid.models import (
    bamba,
    deepseek_v2,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    falcon_h1,
    gemma3,
    glm_moe_dsa,
    gpt_oss,
    granite_hybrid,
    jamba,
    kimi_k3,
    kimi_linear,
    llama,
    mistral,
    nemotron_h,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)

FAMILIES: Mapping[str, ModuleType] = {
    model_type: family
    for family in (
        kimi_linear,
        qwen3_next,
        qwen3,
        nemotron_h,
        jamba,
        deepseek_v2,
        deepseek_v3,
        gemma3,
        gpt_oss,
        llama,
        mistral,
        qwen3_moe,
        deepseek_v32,
        glm_moe_dsa,
        bamba,
        granite_hybrid,
        falcon_h1,
        deepseek_v4,
        qwen3_5,
        kimi_k3,
        qwen2,
    )
    for model_type in family.MODEL_TYPES
}


def family_of(config: Mapping[str, Any], where: str) -> ModuleType:
    """The family module for a config.json. Raises ConfigError for a `model_type` nobody implements."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"{where}: unknown model_type {model_type!r}, expected one of {known}")
    return FAMILIES[model_type]


def translate(values: Mapping[str, Any], where: str) -> ModelConfig:
    """A published config.json, every key of it.

    Raises ConfigError for what is unknown, missing or unsupported, for values of another kind than the key's, and for
    values that do not go together.
    """
    family = family_of(values, where)
    reader = ConfigReader({key: value for key, value in values.items() if key != "model_type"}, where)
    try:
        config: ModelConfig = family.translate(reader)
    except ConfigError as error:
        if str(error).startswith(where):
            raise
        raise reader.error(str(error)) from error  # of a spec, which does not know where its values come from
    reader.finish()
    return config
