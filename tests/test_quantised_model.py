"""A model from a checkpoint that stores its weights quantised: families, saving and fingerprints know nothing of it."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxhybrid as jh
from jaxhybrid.errors import CheckpointError, ConfigError

GOLDEN = Path(__file__).parent / "goldens" / "llama_yarn"
IDS = np.random.default_rng(1).integers(3, 103, 25)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}


def write(folder: Path, tensors: dict[str, np.ndarray], **keys: object) -> Path:
    folder.mkdir()
    config = json.loads((GOLDEN / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def quantise(tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Layers' matrices in FP8 with a scale for each block of 16 x 32, and the values those stand for."""
    stored, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if ".layers." not in name or weight.ndim != 2:
            continue
        rows, columns = (-(-size // block) for size, block in zip(weight.shape, (16, 32), strict=True))
        scales = np.random.default_rng(rows).uniform(0.001, 0.01, (rows, columns)).astype(np.float32)
        factors = np.repeat(np.repeat(scales, 16, axis=0), 32, axis=1)[: weight.shape[0], : weight.shape[1]]
        stored[name] = (weight / factors).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        plain[name] = stored[name].astype(np.float32) * factors
    return stored, plain


@pytest.fixture(scope="module")
def tensors() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    return quantise(load_file(GOLDEN / "model.safetensors"))


def test_it_says_what_the_plain_values_say(tensors: tuple[dict, dict], tmp_path: Path) -> None:
    stored, plain = tensors
    quantised = jh.load_model(write(tmp_path / "fp8", stored, quantization_config=FP8))
    expected = jh.load_model(write(tmp_path / "plain", plain))
    assert len(stored) > len(plain)
    np.testing.assert_array_equal(jh.forward(quantised, IDS), jh.forward(expected, IDS))
    assert quantised.config == expected.config
    assert quantised.fingerprint != expected.fingerprint
    quantised.save(tmp_path / "saved")
    np.testing.assert_array_equal(jh.forward(jh.load_model(tmp_path / "saved"), IDS), jh.forward(expected, IDS))


def test_a_missing_scale_and_a_missing_tensor_are_one_error(tensors: tuple[dict, dict], tmp_path: Path) -> None:
    stored = {
        name: tensor
        for name, tensor in tensors[0].items()
        if not name.endswith(("layers.1.mlp.up_proj.weight_scale_inv", "layers.0.input_layernorm.weight"))
    }
    folder = write(tmp_path / "less", stored, quantization_config=FP8)
    with pytest.raises(
        CheckpointError,
        match=r"2 problems with its tensors\s+'model.layers.1.mlp.up_proj.weight_scale_inv': missing, (.|\s)*"
        r"'model.layers.0.input_layernorm.weight': missing",
    ):
        jh.load_model(folder)


def test_storage_that_nobody_reads_is_named(tensors: tuple[dict, dict], tmp_path: Path) -> None:
    folder = write(tmp_path / "gptq", tensors[1], quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=r"config.json: quantization_config: quant_method='gptq' is not supported"):
        jh.load_model(folder)
