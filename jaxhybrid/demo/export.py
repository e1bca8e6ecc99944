"""Training parameters as a published checkpoint folder."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float
from safetensors.numpy import save_file

from jaxhybrid.demo.architecture import CONFIG
from jaxhybrid.demo.training_model import Parameters

FLOAT32 = ("A_log", "dt_bias", "block_sparse_moe.gate.weight", "e_score_correction_bias")


def export(parameters: Parameters, folder: Path) -> None:
    """Write config.json and model.safetensors: bfloat16, and float32 where the published models keep it."""
    tensors: dict[str, np.ndarray] = {}
    for name, value in parameters.items():
        tensors |= _published(name, np.asarray(value, np.float32))
    folder.mkdir(parents=True, exist_ok=True)
    narrow = {n: t if n.endswith(FLOAT32) else t.astype(ml_dtypes.bfloat16) for n, t in sorted(tensors.items())}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")


def _published(name: str, value: Float[np.ndarray, "..."]) -> dict[str, np.ndarray]:
    """One tensor per expert, and the axes of length 1 that training leaves out."""
    if ".experts." in name:
        prefix, part = name.rsplit(".", 1)
        return {f"{prefix}.{expert}.{part}.weight": matrix for expert, matrix in enumerate(value)}
    if name.endswith("A_log"):
        return {name: value.reshape(1, 1, -1, 1)}
    if name.endswith("conv1d.weight"):
        return {name: value[:, None, :]}
    return {name: value}
