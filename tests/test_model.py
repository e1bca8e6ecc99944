"""Loading: every way a folder can be wrong gives one error that says what and where, and a good one loads after it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxhybrid as jh
from jaxhybrid.chat import Prompt
from jaxhybrid.config import DenseSpec, KimiDeltaSpec, LatentAttentionSpec, LayerSpec, ModelConfig
from jaxhybrid.errors import CheckpointError, ConfigError, JaxHybridError, TokenError
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.decoder import Decoder, abstract_decoder
from jaxhybrid.state.arrays import pool_arrays
from jaxhybrid.state.batch import BatchAddress

GOLDENS = Path(__file__).parent / "goldens"
IDS = np.random.default_rng(2).integers(2, 61, 40)


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    made = tmp_path / "checkpoint"
    made.mkdir()
    for file in ("config.json", "model.safetensors"):
        (made / file).write_bytes((tiny_folder / file).read_bytes())
    return made


def with_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def with_config(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "-"}))

    return apply


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("breaks", "kind", "named"),
    [
        (with_tensors(lambda all_: all_.pop(NORM)), CheckpointError, [f"'{NORM}': missing", "1 problem "]),
        (
            with_tensors(lambda all_: all_.update({"model.extra.weight": np.zeros(3, np.float32)})),
            CheckpointError,
            ["model.safetensors: 'model.extra.weight': unknown", "1 problem "],
        ),
        (
            with_tensors(lambda all_: all_.update({HEAD: np.zeros((61, 23), np.float32)})),
            CheckpointError,
            [f"model.safetensors: '{HEAD}': expected shape (61, 24), found (61, 23)", "1 problem "],
        ),
        (
            with_tensors(lambda all_: (all_.pop(NORM), all_.update({HEAD: np.zeros((3, 24), np.float32)}))),
            CheckpointError,
            [NORM, HEAD, "2 problems"],
        ),
        (
            with_tensors(lambda all_: all_.update({NORM: np.full(24, np.nan, np.float32)})),
            CheckpointError,
            [f"model.safetensors: '{NORM}': expected finite values"],
        ),
        (truncated, CheckpointError, ["model.safetensors: truncated: tensor"]),
        (with_config(model_type="gpt2"), ConfigError, ["config.json: unknown model_type 'gpt2'"]),
        (with_config(window=4), ConfigError, ["config.json: unknown keys window"]),
        (with_config(kv_lora_rank="-"), ConfigError, ["config.json: expected key 'kv_lora_rank'"]),
        (with_config(hidden_act="gelu"), ConfigError, ["config.json: hidden_act='gelu'"]),
        (lambda folder: (folder / "config.json").unlink(), CheckpointError, ["config.json"]),
        (lambda folder: (folder / "config.json").write_text("{"), CheckpointError, ["config.json: expected JSON"]),
        (lambda folder: (folder / "model.safetensors").unlink(), CheckpointError, ["expected model.safetensors"]),
    ],
    ids=[
        "missing tensor", "extra tensor", "wrong shape", "two problems", "not finite", "truncated", "model type",
        "unknown key", "missing key", "option", "no config", "no json", "no weights",
    ],
)  # fmt: skip
def test_a_broken_folder_is_one_error_that_says_what_and_where(
    folder: Path, tiny_folder: Path, breaks: Callable[[Path], object], kind: type[JaxHybridError], named: list[str]
) -> None:
    breaks(folder)
    with pytest.raises(kind) as caught:
        jh.load_model(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert [part for part in named if part not in message] == []
    assert jh.load_model(tiny_folder).config.hidden_size == 24


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}/nowhere: expected a file config.json, found none"):
        jh.load_model(tmp_path / "nowhere")


def test_an_identical_copy_is_the_same_model(folder: Path, tiny_model: jh.Model) -> None:
    copied = jh.load_model(str(folder))
    assert copied.fingerprint == tiny_model.fingerprint
    assert copied.config_fingerprint == tiny_model.config_fingerprint
    assert np.array_equal(jh.forward(copied, IDS), jh.forward(tiny_model, IDS))
    with_tensors(lambda tensors: tensors.update({NORM: tensors[NORM] * 1.5}))(folder)
    with_config(bos_token_id=1)(folder)
    changed = jh.load_model(folder)
    assert changed.fingerprint != tiny_model.fingerprint
    assert changed.config_fingerprint != tiny_model.config_fingerprint
    assert changed.parameter_count == tiny_model.parameter_count


def test_the_parameters_are_those_of_the_file(folder: Path, tiny_model: jh.Model) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert tiny_model.parameter_count == sum(tensor.size for tensor in tensors.values())


def test_a_saved_model_is_the_same_model(tiny_folder: Path, tiny_model: jh.Model, tmp_path: Path) -> None:
    tiny_model.save(tmp_path / "saved")
    loaded = jh.load_model(tmp_path / "saved")
    assert loaded.config == tiny_model.config
    assert (loaded.fingerprint, loaded.config_fingerprint) == (tiny_model.fingerprint, tiny_model.config_fingerprint)
    assert np.array_equal(jh.forward(loaded, IDS), jh.forward(tiny_model, IDS))
    with pytest.raises(CheckpointError, match="saved"):
        tiny_model.save(tmp_path / "saved")
    (tmp_path / "saved" / "jaxhybrid.json").unlink()  # as an interrupted save leaves it
    with pytest.raises(CheckpointError, match="saved"):
        jh.load_model(tmp_path / "saved")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "non-empty"),
        ([[1, 2]], "non-empty list of token ids, got shape"),
        ([1.0, 2.0], "expected integer token ids, got float64"),
        ([[1], [2, 3]], "expected a list of integer token ids, got list"),
        ("[1, 2]", r"got text: model.tokenizer.encode\(text\) gives its ids"),
        (Prompt((3, 4), 1, "Hi"), r"got a Prompt: pass its \.token_ids"),
        ([3, 61, 4], "token id 61 at position 1 is outside 0 to 60"),
        ([3, 5, -1], "token id -1 at position 2 is outside 0 to 60"),
        ([3] * 4097, "4097 tokens are more than the model's 4096 positions"),
    ],
)
def test_bad_token_ids_are_refused(tiny_model: jh.Model, ids: Any, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        jh.forward(tiny_model, ids)


def test_forward_is_causal_and_independent_of_its_chunks(tiny_model: jh.Model, monkeypatch) -> None:
    whole = np.asarray(jh.forward(tiny_model, IDS))
    assert whole.shape == (40, 61)
    assert np.allclose(jh.forward(tiny_model, IDS[:17]), whole[:17], atol=2e-5)
    monkeypatch.setattr("jaxhybrid.model.FORWARD_CHUNK", 16)
    assert np.allclose(jh.forward(tiny_model, IDS), whole, atol=2e-5)


# Weights in bfloat16: differences in units of the float32 logits' standard deviation. Rounding the weights alone sends
# some tokens of kimi_linear_a to other experts (its six are close to each other), so only its median and mean count.


def differences(folder: Path, ids: np.ndarray, expected: np.ndarray) -> np.ndarray:
    model = jh.load_model(folder, dtype="bfloat16")
    assert model.parameters["embed_tokens"][...].dtype == jnp.bfloat16
    logits = np.asarray(jh.forward(model, ids))
    assert logits.dtype == np.float32
    return np.abs(logits - expected) / expected.std()


def test_bfloat16_weights_of_a_dense_hybrid(tiny_folder: Path, tiny_model: jh.Model) -> None:
    apart = differences(tiny_folder, IDS, np.asarray(jh.forward(tiny_model, IDS)))
    assert apart.max() < 0.12
    assert 1e-4 < apart.mean() < 0.012


@pytest.mark.parametrize(
    ("name", "limits"), [("qwen3_a", {50: 0.012, 100: 0.12}), ("kimi_linear_a", {50: 0.06, 75: 0.15})]
)
def test_bfloat16_weights_of_the_goldens(name: str, limits: dict[int, float]) -> None:
    """`limits`: percentile of all logits' differences, and what it must stay under."""
    with np.load(GOLDENS / name / "golden.npz") as arrays:
        ids, expected = arrays["input_ids"][0], arrays["logits"][0]
    apart = differences(GOLDENS / name, ids, expected)
    for percentile, limit in limits.items():
        assert np.percentile(apart, percentile) < limit


# Depth

PATTERN = (
    LayerSpec(KimiDeltaSpec(2, 6, 4), DenseSpec(20)),
    LayerSpec(LatentAttentionSpec(3, None, 14, 12, 4, 9, False), DenseSpec(20)),
)


def program_size(repeats: int, scan: bool) -> int:
    """Characters of the lowered forward program of PATTERN repeated; shapes only, nothing is allocated."""
    config = ModelConfig("kimi_linear", 61, 24, PATTERN * repeats, 1e-5, False, False, 4096)
    graph, parameters = nnx.split(abstract_decoder(config, Execution(scan, False), "float32"))
    slots = jnp.ones(1, jnp.int32)
    address = BatchAddress(jnp.zeros(1, jnp.int32), jnp.full(1, 16), slots[:, None], slots, slots)

    def logits(parameters: nnx.State, pool: dict, tokens: jax.Array) -> tuple[jax.Array, dict]:
        decoder: Decoder = nnx.merge(graph, parameters)
        outputs, pool = decoder.trunk(tokens, pool, address)
        return decoder.logits(outputs), pool

    pool = jax.eval_shape(lambda: pool_arrays(nnx.merge(graph, parameters).layout, 2, 2, 64))
    return len(jax.jit(logits).lower(parameters, pool, jax.ShapeDtypeStruct((1, 16), jnp.int32)).as_text())


def test_a_deep_scanned_model_is_no_larger_a_program() -> None:
    """12 repeats of two layers against one: compile time follows the program's size."""
    one = program_size(1, scan=True)
    assert program_size(12, scan=True) <= 1.5 * one
    assert program_size(12, scan=False) > 5 * one


# Importing


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_jaxhybrid_does_not_import_jax() -> None:
    code = (
        "import sys, jaxhybrid as jh, jaxhybrid.config, jaxhybrid.errors, jaxhybrid.cache.prefix_index; "
        "jh.Retention(), jh.EngineConfig(); print('jax' in sys.modules, 'flax' in sys.modules)"
    )
    assert run_python(code).split() == ["False", "False"]


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(jh, name).__name__ == name for name in jh.__all__)
    with pytest.raises(AttributeError, match="module 'jaxhybrid' has no attribute 'load'"):
        jh.load  # noqa: B018
