"""How a checkpoint wants to be sampled: `generation_config.json`, as far as it says."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxhybrid.checkpoint.json_file import read_json_object
from jaxhybrid.errors import ConfigError

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """What `generation_config.json` recommends; what it leaves out is off. Names are `Sampling`'s.

    stop_token_ids: the end tokens it and `config.json` name. temperature: 0, greedy, unless it says `do_sample`.
    """

    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_generation_defaults(folder: Path, end_token_ids: tuple[int, ...]) -> GenerationDefaults:
    """The folder's defaults; only `end_token_ids`, the config's, where it has no such file.

    Raises `CheckpointError` for a file that is no JSON object, `ConfigError` for a value of another type.
    """
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return GenerationDefaults(end_token_ids)
    values = read_json_object(path)
    declared = values.get("eos_token_id")
    ends = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if not all(type(token) is int for token in ends):
        raise ConfigError(f"{path}: eos_token_id: expected a token id or a list of them, found {declared!r}")
    return GenerationDefaults(
        stop_token_ids=tuple(dict.fromkeys([*ends, *end_token_ids])),
        temperature=_number(values, "temperature", 1.0, path) if values.get("do_sample") else 0.0,
        top_k=int(_number(values, "top_k", 0, path)),
        top_p=_number(values, "top_p", 1.0, path),
        min_p=_number(values, "min_p", 0.0, path),
        repetition_penalty=_number(values, "repetition_penalty", 1.0, path),
    )


def _number(values: Mapping[str, Any], name: str, default: float, path: Path) -> float:
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path}: {name}: expected a number, found {value!r}")
    return value
