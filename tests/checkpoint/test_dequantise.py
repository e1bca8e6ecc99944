"""Quantised tensors against values worked out one at a time, as each format's description reads."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxhybrid.checkpoint import dequantise
from jaxhybrid.checkpoint.dequantise import DequantisedFolder
from jaxhybrid.checkpoint.fill import WeightRule, fill
from jaxhybrid.checkpoint.safetensors_folder import CheckpointFolder
from jaxhybrid.errors import CheckpointError, ConfigError

FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
PLAIN = np.arange(6, dtype=np.float32).reshape(2, 3)

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 8]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
K3 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 32, "type": "float"},
        }
    },
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 32, "symmetric": True, "strategy": "group", "actorder": None},
        }
    },
}


def random_bytes(*shape, high=256, low=0):
    return np.random.default_rng(sum(shape)).integers(low, high, shape, dtype=np.uint8)


def e8m0(*shape):
    return random_bytes(*shape, low=120, high=134)


def fp8_tensors():
    weight = np.linspace(-7, 9, 10 * 19).reshape(10, 19).astype(ml_dtypes.float8_e4m3fn)
    scale = np.linspace(0.1, 3, 9).reshape(3, 3).astype(np.float32)  # 10 rows in blocks of 4, 19 columns of 8
    expected = np.empty((10, 19), np.float32)
    for row, column in np.ndindex(10, 19):
        expected[row, column] = np.float32(weight[row, column]) * scale[row // 4, column // 8]
    return {"a.weight": weight, "a.weight_scale_inv": scale}, {"a.weight": expected}


def deepseek_v4_tensors():
    fused = np.linspace(-448, 448, 2 * 5 * 16).reshape(2, 5, 16).astype(ml_dtypes.float8_e4m3fn)
    fused_scale = e8m0(2, 2, 2).view(ml_dtypes.float8_e8m0fnu)
    packed, scale = random_bytes(3, 32), e8m0(3, 2)
    expected = np.empty((2, 5, 16), np.float32)
    for at in np.ndindex(expected.shape):
        exponent = int(fused_scale.view(np.uint8)[at[0], at[1] // 4, at[2] // 8]) - 127
        expected[at] = np.float32(fused[at]) * 2.0**exponent
    stored = {
        "layers.0.attn.wkv.weight": fused,
        "layers.0.attn.wkv.scale": fused_scale,
        "layers.0.ffn.experts.0.w1.weight": packed.view(np.int8),
        "layers.0.ffn.experts.0.w1.scale": scale.view(ml_dtypes.float8_e8m0fnu),
        "layers.0.hc_attn_scale": PLAIN,
    }
    return stored, {
        "layers.0.attn.wkv.weight": expected,
        "layers.0.ffn.experts.0.w1.weight": fp4_by_hand(packed, scale),
        "layers.0.hc_attn_scale": PLAIN,
    }


def fp4_by_hand(packed, scale):
    """[o, n] bytes as [o, 2n] values: the low nibble is the even column."""
    values = np.empty((packed.shape[0], 2 * packed.shape[1]), ml_dtypes.bfloat16)
    for row, column in np.ndindex(values.shape):
        byte = int(packed[row, column // 2])
        nibble = byte >> 4 if column % 2 else byte & 15
        values[row, column] = FP4[nibble] * 2.0 ** (int(scale[row, column // 32]) - 127)
    return values


def gpt_oss_tensors():
    blocks, scales = random_bytes(3, 5, 2, 16), e8m0(3, 5, 2)
    experts = [fp4_by_hand(blocks[e].reshape(5, 32), scales[e]).T for e in range(3)]
    name = "mlp.experts.gate_up_proj"
    stored = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": PLAIN}
    return stored, {name: np.stack(experts), f"{name}_bias": PLAIN}


def kimi_k3_tensors():
    packed, scale = random_bytes(5, 48), e8m0(5, 3)
    stored = {"w1.weight_packed": packed, "w1.weight_scale": scale, "w2.weight": PLAIN}
    return stored, {"w1.weight": fp4_by_hand(packed, scale), "w2.weight": PLAIN}


def int4_tensors(columns=64):
    values = np.random.default_rng(3).integers(-8, 8, (5, columns))
    words = np.zeros((5, columns // 8), np.uint32)
    for row, column in np.ndindex(values.shape):
        words[row, column // 8] |= np.uint32((int(values[row, column]) + 8) << 4 * (column % 8))
    scale = np.linspace(0.01, 2, 10).reshape(5, 2).astype(ml_dtypes.bfloat16)
    expected = (values * np.repeat(scale.astype(np.float32), 32, axis=1)[:, :columns]).astype(np.float32)
    stored = {
        "w1.weight_packed": words.view(np.int32),
        "w1.weight_scale": scale,
        "w1.weight_shape": np.array([5, columns], np.int64),
    }
    return stored, {"w1.weight": expected}


CASES = {
    "fp8": (FP8, fp8_tensors),
    "deepseek_v4": (FP8 | {"scale_fmt": "ue8m0"}, deepseek_v4_tensors),
    "gpt_oss": (MXFP4, gpt_oss_tensors),
    "kimi_k3": (K3, kimi_k3_tensors),
    "int4": (INT4, int4_tensors),
    "int4_with_a_cut_group": (INT4, lambda: int4_tensors(40)),
}


def open_folder(path, quantised, tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path / "model.safetensors")
    return DequantisedFolder.over(CheckpointFolder.open(path))


def fill_all(folder, expected):
    abstract = {(name,): jax.ShapeDtypeStruct(value.shape, jnp.float32) for name, value in expected.items()}
    return fill(abstract, [WeightRule(name, (name,)) for name in expected], folder)


@pytest.mark.parametrize("part", [dequantise._PART_VALUES, 70])
@pytest.mark.parametrize("case", CASES)
def test_exact_values_under_unquantised_names(tmp_path, monkeypatch, case, part):
    monkeypatch.setattr(dequantise, "_PART_VALUES", part)
    quantised, make = CASES[case]
    stored, expected = make()
    folder = open_folder(tmp_path, quantised, stored)
    assert folder.tensors.keys() == expected.keys()
    assert folder.problems == ()
    for name, value in expected.items():
        info, read = folder.tensors[name], folder.read(name)
        assert (info.name, info.shape, info.dtype) == (name, value.shape, value.dtype)
        assert (read.shape, read.dtype) == (value.shape, value.dtype)
        np.testing.assert_array_equal(read.astype(np.float32), value.astype(np.float32))
    filled = fill_all(folder, expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(filled[(name,)], value.astype(np.float32))


@pytest.mark.parametrize("case", CASES)
def test_a_missing_and_a_misshapen_scale_are_in_the_one_error(tmp_path, case):
    quantised, make = CASES[case]
    stored, expected = make()
    scale = next(name for name in stored if name.endswith(("scale", "scale_inv", "scales")))
    less = {name: tensor for name, tensor in stored.items() if name != scale}
    with pytest.raises(CheckpointError, match=rf"1 problem(.|\n)*{scale}': missing, .* is quantised and needs it"):
        fill_all(open_folder(tmp_path / "missing", quantised, less), expected)
    cut = stored | {scale: stored[scale][:-1]}
    shapes = rf"{scale}': expected shape \({stored[scale].shape[0]}, .*found \({stored[scale].shape[0] - 1}, "
    with pytest.raises(CheckpointError, match=rf"1 problem(.|\n)*model.safetensors: '.*{shapes}"):
        fill_all(open_folder(tmp_path / "cut", quantised, cut), expected)
    wrong = stored | {scale: np.zeros(stored[scale].shape, np.int64)}
    with pytest.raises(CheckpointError, match=rf"1 problem(.|\n)*{scale}': expected .*, found int64"):
        fill_all(open_folder(tmp_path / "dtype", quantised, wrong), expected)


def test_a_scale_without_its_weight_stays_unknown(tmp_path):
    folder = open_folder(tmp_path, FP8, {"a.weight": PLAIN, "a.weight_scale_inv": PLAIN})
    with pytest.raises(CheckpointError, match=r"1 problem(.|\n)*'a.weight_scale_inv': unknown, no rule maps it"):
        fill_all(folder, {"a.weight": PLAIN})


def test_a_contradicting_weight_shape(tmp_path):
    stored, _ = int4_tensors()
    folder = open_folder(tmp_path, INT4, stored | {"w1.weight_shape": np.array([5, 63])})
    with pytest.raises(CheckpointError, match=r"'w1.weight': expected shape \(5, 64\) as packed, .* says \(5, 63\)"):
        folder.read("w1.weight")


def test_a_scale_that_is_not_a_number_is_refused_on_load(tmp_path):
    stored, expected = kimi_k3_tensors()
    stored["w1.weight_scale"][3, 1] = 255
    with pytest.raises(CheckpointError, match=r"'w1.weight': expected finite values"):
        fill_all(open_folder(tmp_path, K3, stored), expected)


def test_without_quantization_everything_is_as_stored(tmp_path):
    folder = open_folder(tmp_path, None, {"a.weight": PLAIN, "a.scale": PLAIN})
    assert folder.tensors == folder.folder.tensors
    np.testing.assert_array_equal(folder.read("a.scale"), PLAIN)


def test_the_config_of_a_text_model_inside_counts():
    nested = {"text_config": {"quantization_config": K3}}
    assert dequantise.scheme_of(nested, "config.json") is dequantise.packed_mxfp4


@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq' is not supported"),
        ({"quant_method": "fp8"}, r"expected weight_block_size as \[rows, columns\], found None"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        (INT4 | {"format": "float-quantized"}, "format 'float-quantized' is not supported"),
        (
            INT4 | {"config_groups": {"g": {"weights": {"num_bits": 8, "group_size": 32}}}},
            "expected symmetric weights of 4 bits in groups of 32",
        ),
    ],
)
def test_other_storage_is_refused(quantised, message):
    with pytest.raises(ConfigError, match=f"config.json: quantization_config: .*{message}"):
        dequantise.scheme_of({"quantization_config": quantised}, "config.json")
