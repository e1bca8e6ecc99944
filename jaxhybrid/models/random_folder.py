"""Writes a checkpoint of random weights in the published format, for benchmarks and tests of real sizes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Float
from safetensors.numpy import save_file

from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.decoder import abstract_decoder
from jaxhybrid.models import family_of, translate
from jaxhybrid.models.weight_table import WeightTable


def write_random_folder(folder: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """config.json and model.safetensors (float32) with every tensor the config's family names.

    Matrices keep the scale of what passes them, norms are near their neutral value, decays between fast and slow.
    """
    translated = translate(config, "config")
    execution = Execution(scan_layers=False, stack_experts=False)
    _, abstract = nnx.split(abstract_decoder(translated, execution, "float32"))
    leaves = dict(nnx.to_flat_state(abstract))
    table = WeightTable(translated, execution)
    family_of(config, "config").weights(table, translated)
    neutral = 0.0 if translated.zero_centred_norms else 1.0
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for rule in table.rules:
        shape = rule.shape or leaves[rule.path].shape[len(rule.index) :]
        if rule.name not in tensors:
            tensors[rule.name] = _random(rng, rule.name, shape, neutral)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], neutral: float) -> Float[np.ndarray, "..."]:
    if name.endswith("A_log"):
        value = np.log(rng.uniform(0.3, 3.0, shape))
    elif name.endswith("dt_bias"):
        value = rng.normal(-1.0, 0.7, shape)
    elif name.endswith("e_score_correction_bias"):
        value = rng.normal(0.0, 0.05, shape)
    elif name.endswith(".bias"):
        value = rng.normal(0.0, 0.1, shape)
    elif len(shape) == 1:
        plain = name.endswith(("linear_attn.norm.weight", "o_norm.weight", "a_layernorm.weight")) or ".visual." in name
        value = rng.normal(1.0 if plain else neutral, 0.1, shape)
    elif "embed" in name:
        value = rng.normal(size=shape)
    else:
        value = rng.normal(size=shape) / np.sqrt(shape[-1])
    return value.astype(np.float32)
