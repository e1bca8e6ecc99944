import hashlib
import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxhybrid.checkpoint import fingerprint
from jaxhybrid.checkpoint.fingerprint import CACHE, config_fingerprint, hash_tensors, weights_fingerprint
from jaxhybrid.checkpoint.safetensors_folder import CheckpointFolder
from jaxhybrid.errors import CheckpointError

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.array(3, np.int32),
}


def write(path, *shards):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    weight_map = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, path / f"{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return CheckpointFolder.open(path)


def part(*names):
    return {name: TENSORS[name] for name in names}


@pytest.fixture
def hashed(monkeypatch):
    """The folders that were hashed, each time they were; nothing is remembered from other tests."""
    fingerprint._hash_files.cache_clear()
    calls = []

    def spy(folder):
        calls.append(folder.path)
        return hash_tensors(folder)

    monkeypatch.setattr(fingerprint, "hash_tensors", spy)
    return calls


def test_it_does_not_depend_on_the_split_into_files(tmp_path):
    splits = [[part("a", "b", "c")], [part("c"), part("b", "a")], [part("b"), part("a"), part("c")]]
    found = {weights_fingerprint(write(tmp_path / str(number), *split)) for number, split in enumerate(splits)}
    assert len(found) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"a": TENSORS["a"] + np.float32(1e-6)},
        {"a": TENSORS["a"].reshape(3, 2)},
        {"a": TENSORS["a"].view(np.int32)},
        {"d": TENSORS["a"]},
        {"c": np.array(4, np.int32)},
        {"a": TENSORS["b"], "b": TENSORS["a"]},
    ],
)
def test_every_change_of_a_tensor_shows(tmp_path, change):
    first = weights_fingerprint(write(tmp_path / "first", TENSORS))
    assert weights_fingerprint(write(tmp_path / "second", TENSORS | change)) != first


def test_the_definition(tmp_path):
    # Identities of stored state rest on it.
    digest = hashlib.sha256()
    for name, dtype in (("a", "float32"), ("b", "bfloat16"), ("c", "int32")):
        value = TENSORS[name]
        digest.update(json.dumps([name, dtype, list(value.shape), value.nbytes]).encode() + b"\n" + value.tobytes())
    assert weights_fingerprint(write(tmp_path, TENSORS)) == digest.hexdigest()


def test_it_is_computed_once_and_kept_beside_the_weights(tmp_path, hashed):
    folder = write(tmp_path, part("a"), part("b", "c"))
    first = weights_fingerprint(folder)
    cache = json.loads((tmp_path / CACHE).read_text())
    assert cache["sha256"] == first
    assert [name for name, _, _ in cache["files"]] == ["0.safetensors", "1.safetensors"]
    fingerprint._hash_files.cache_clear()
    assert weights_fingerprint(CheckpointFolder.open(tmp_path)) == first
    assert hashed == [tmp_path]


def test_a_replaced_file_is_hashed_anew(tmp_path, hashed):
    first = weights_fingerprint(write(tmp_path, TENSORS))
    folder = write(tmp_path, TENSORS | {"c": np.array(4, np.int32)})
    os.utime(tmp_path / "0.safetensors", ns=(1, 1))
    assert weights_fingerprint(folder) != first
    assert len(hashed) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: json.dumps(cache)[:-20],
        lambda cache: "",
        lambda cache: "[]",
        lambda cache: json.dumps(cache | {"format": 0}),
        lambda cache: json.dumps(cache | {"sha256": "f" * 63}),
        lambda cache: json.dumps(cache | {"sha256": "X" * 64}),
        lambda cache: json.dumps(cache | {"sha256": None}),
        lambda cache: json.dumps(cache | {"files": None}),
    ],
)
def test_a_damaged_cache_is_replaced(tmp_path, hashed, damage):
    folder = write(tmp_path, TENSORS)
    first = weights_fingerprint(folder)
    cache = json.loads((tmp_path / CACHE).read_text())
    (tmp_path / CACHE).write_text(damage(cache))
    fingerprint._hash_files.cache_clear()
    assert weights_fingerprint(folder) == first
    assert len(hashed) == 2
    assert json.loads((tmp_path / CACHE).read_text()) == cache


def test_a_folder_that_cannot_be_written_is_remembered(tmp_path, hashed, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(fingerprint, "write_json_object", refuse)
    folder = write(tmp_path, TENSORS)
    first = weights_fingerprint(folder)
    assert not (tmp_path / CACHE).exists()
    assert weights_fingerprint(CheckpointFolder.open(tmp_path)) == first
    assert len(hashed) == 1


def test_a_file_that_is_gone(tmp_path):
    folder = write(tmp_path, part("a"), part("b"))
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a file of its weights is gone: .*1\.safetensors"):
        weights_fingerprint(folder)


def test_config_fingerprint():
    first = config_fingerprint({"a": 1, "b": [1.5, float("inf"), None]})
    assert config_fingerprint({"b": [1.5, float("inf"), None], "a": 1}) == first
    assert len(first) == 64
    for other in ({"a": 2, "b": [1.5, float("inf"), None]}, {"a": 1}, {"a": 1, "b": [float("inf"), 1.5, None]}):
        assert config_fingerprint(other) != first
