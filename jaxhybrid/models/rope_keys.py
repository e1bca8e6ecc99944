"""The rope keys of a published config.json, in any of their spellings, as a RopeSpec."""

from collections.abc import Mapping
from typing import Any

from jaxhybrid.config import DynamicScaling, LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.errors import ConfigError

# What beside a scaling's own keys says how positions turn: kept when a scaling is replaced.
_BASE_KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def rope_spec(
    rope: ConfigReader,
    head_dim: int,
    positions: int,
    *,
    theta: float | None = None,
    partial: float = 1.0,
    interleaved: bool = False,
) -> RopeSpec:
    """Takes every key of `rope`, which `ConfigReader.rope` returns.

    positions: the config's `max_position_embeddings`, which a scaling that does not name its own starts from.
    theta, partial: what the family's files mean by leaving `rope_theta` or `partial_rotary_factor` out.
    Raises ConfigError for a missing or unknown key or `rope_type`.
    """
    spec = RopeSpec(
        theta=float(rope.take("rope_theta") if theta is None else rope.take("rope_theta", default=theta)),
        rotary_dim=int(head_dim * rope.take("partial_rotary_factor", default=partial)),
        interleaved=interleaved,
        scaling=_scaling(rope, positions),
        sections=_sections(rope),
    )
    rope.finish()
    return spec


def _sections(rope: ConfigReader) -> tuple[int, int, int] | None:
    sections = rope.take("mrope_section", default=None)
    if sections is None:
        return None
    rope.require("mrope_interleaved", True, default=False)
    time, height, width = sections
    return time, height, width


def _scaling(rope: ConfigReader, positions: int) -> RopeScaling | None:
    kind = rope.take("rope_type", default="default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(float(rope.take("factor")))
    trained = rope.take("original_max_position_embeddings", default=positions)
    match kind:
        case "dynamic":
            return DynamicScaling(float(rope.take("factor")), trained)
        case "llama3":
            low, high = float(rope.take("low_freq_factor")), float(rope.take("high_freq_factor"))
            return Llama3Scaling(float(rope.take("factor")), low, high, trained)
        case "yarn":
            factor = rope.take("factor", default=None)
            return YarnScaling(
                factor=float(positions / trained if factor is None else factor),
                original_max_position_embeddings=trained,
                beta_fast=float(rope.take("beta_fast", default=None) or 32),
                beta_slow=float(rope.take("beta_slow", default=None) or 1),
                truncate=rope.take("truncate", default=True),
                attention_factor=rope.take("attention_factor", default=None),
                mscale=rope.take("mscale", default=None),
                mscale_all_dim=rope.take("mscale_all_dim", default=None),
            )
    raise rope.error(f"rope_type={kind!r} is not supported, expected default, linear, dynamic, llama3 or yarn")


def context_length(rope: RopeSpec, positions: int) -> int:
    """How many positions the model takes: dynamic scaling goes on where the config's `max_position_embeddings` ends."""
    scaling = rope.scaling
    if isinstance(scaling, DynamicScaling) and scaling.original_max_position_embeddings == positions:
        return int(positions * scaling.factor)
    return positions


def with_rope_scaling(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json as if it had been published with another `rope_scaling`: the hook for longer contexts.

    scaling: `rope_scaling` as Hugging Face spells it, such as {"rope_type": "linear", "factor": 4.0} for position
    interpolation (arXiv 2306.15595) or {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}.
    The model then takes factor times the positions it was trained on: `original_max_position_embeddings` of the
    scaling, or else the config's `max_position_embeddings`. Raises ConfigError for a scaling without type or factor,
    and where no number of positions is known.
    """
    if not isinstance(scaling.get("factor"), int | float) or not isinstance(scaling.get("rope_type"), str):
        raise ConfigError(f"rope_scaling: expected rope_type and factor, found {dict(scaling)!r}")
    if "text_config" in config:
        return {**config, "text_config": with_rope_scaling(config["text_config"], scaling)}
    trained = scaling.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    if trained is None:
        raise ConfigError("rope_scaling: expected original_max_position_embeddings, which the config does not say")
    changed = {**config, "max_position_embeddings": int(trained * scaling["factor"])}
    new = {**scaling, "original_max_position_embeddings": trained}
    if scaling["rope_type"] == "linear":  # stretches all positions alike
        del new["original_max_position_embeddings"]
    old = config.get("rope_parameters")
    if old is None:
        return {**changed, "rope_scaling": new}
    for kind in ("full_attention", "compress"):  # the layers that see far, of families that tell layers apart
        if kind in old:
            return {**changed, "rope_parameters": {**old, kind: {**_base(old[kind]), **new}}}
    return {**changed, "rope_parameters": {**_base(old), **new}}


def _base(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key in _BASE_KEYS}
