import json
import math
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxhybrid.checkpoint.safetensors_folder import DTYPES, CheckpointFolder, read_header
from jaxhybrid.errors import CheckpointError

TENSORS = {
    "embed.weight": np.arange(35, dtype=np.float32).reshape(5, 7),
    "layers.0.weight": np.linspace(-3, 3, 6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "layers.1.weight": np.linspace(4, 9, 6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "scale": np.array(2.5, np.float16),
    "table": np.arange(11, dtype=np.int64),
    "nothing": np.zeros((0, 4), np.float32),
}


def write_folder(path, shards=(TENSORS,), config='{"hidden_size": 7}'):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config)
    if len(shards) == 1:
        save_file(shards[0], path / "model.safetensors")
        return path
    weight_map = {}
    for number, tensors in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, path / file)
        weight_map |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def split(*names):
    return [{key: value for key, value in TENSORS.items() if (key in names) is inside} for inside in (True, False)]


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path / "sharded", split("embed.weight", "layers.1.weight"))


def raises(*parts):
    """A CheckpointError whose message has all the parts."""
    return pytest.raises(CheckpointError, match="".join(f"(?=(.|\n)*{part})" for part in parts))


def raw_file(path, header, data=b""):
    """A safetensors file with any header: a dict, or text as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("shards", [[TENSORS], split("scale", "table"), split("embed.weight")])
def test_tensors_come_back_as_written(tmp_path, shards):
    folder = CheckpointFolder.open(write_folder(tmp_path, shards))
    assert folder.tensors.keys() == TENSORS.keys()
    assert len(folder.files) == len(shards)
    for name, expected in TENSORS.items():
        info = folder.tensors[name]
        assert (info.name, info.shape, info.dtype) == (name, expected.shape, expected.dtype)
        value = folder.read(name)
        assert value.dtype == expected.dtype
        assert value.shape == expected.shape
        np.testing.assert_array_equal(value, expected)
        assert b"".join(folder.stream(name)) == expected.tobytes()


def test_every_dtype_of_the_format_is_read(tmp_path):
    data = np.arange(48, dtype=np.uint8)
    header, position = {}, 0
    for code, dtype in DTYPES.items():
        size = 3 * dtype.itemsize
        header[code] = {"dtype": code, "shape": [3], "data_offsets": [position, position + size]}
        position += size
    raw_file(tmp_path / "model.safetensors", header, np.resize(data, position).tobytes())
    (tmp_path / "config.json").write_text("{}")
    folder = CheckpointFolder.open(tmp_path)
    start = 0
    for code, dtype in DTYPES.items():
        expected = np.resize(data, position)[start : start + 3 * dtype.itemsize]
        assert folder.read(code).tobytes() == expected.tobytes()
        assert folder.read(code).dtype == dtype
        start += 3 * dtype.itemsize


def test_a_tensor_is_in_memory_of_its_own(tmp_path):
    folder = CheckpointFolder.open(write_folder(tmp_path))
    first = folder.read("embed.weight")
    first[:] = -1
    np.testing.assert_array_equal(folder.read("embed.weight"), TENSORS["embed.weight"])


def test_config_accepts_infinities(tmp_path):
    text = '{"a": Infinity, "b": {"__float__": "-Infinity"}, "c": [{"__float__": "NaN"}], "d": {"e": 1}}'
    config = CheckpointFolder.open(write_folder(tmp_path, config=text)).config
    assert config["a"] == math.inf
    assert config["b"] == -math.inf
    assert math.isnan(config["c"][0])
    assert config["d"] == {"e": 1}


def test_no_folder(tmp_path):
    with raises("absent: expected a checkpoint folder, found nothing"):
        CheckpointFolder.open(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with raises("file: expected a checkpoint folder, found a file"):
        CheckpointFolder.open(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json: expected JSON: .*line 1"),
        ("[1]", r"config\.json: expected a JSON object, found list"),
        ('{"a": {"__float__": "many"}}', r"config\.json: expected JSON: .*many"),
        ('{"a": {"__float__": [1]}}', r"config\.json: expected JSON"),
        ('{"a": {"__float__": 1}}', r"config\.json: expected JSON"),
        ('{"__float__": "1"}', r"config\.json: expected a JSON object, found float"),
        ("[" * 100_000, r"config\.json: expected JSON"),
    ],
)
def test_broken_config(tmp_path, text, message):
    with raises(message):
        CheckpointFolder.open(write_folder(tmp_path, config=text))


def test_config_that_is_no_text(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with raises(r"config\.json: expected JSON: 'utf-8'"):
        CheckpointFolder.open(tmp_path)


def test_no_config(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    with raises(r"expected a file config\.json, found none"):
        CheckpointFolder.open(tmp_path)


def test_no_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with raises(r"expected model\.safetensors or model\.safetensors\.index\.json, found no safetensors file"):
        CheckpointFolder.open(tmp_path)
    save_file(TENSORS, tmp_path / "model-00001-of-00002.safetensors")
    with raises(r"found only model-00001-of-00002\.safetensors"):
        CheckpointFolder.open(tmp_path)


def test_index_naming_an_absent_file(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with raises(r"index\.json", r"model-00002-of-00002\.safetensors", "'layers.0.weight'", "absent"):
        CheckpointFolder.open(sharded)


def edit_index(folder, **changes):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


def test_index_with_a_tensor_that_no_shard_has(sharded):
    edit_index(sharded, ghost="model-00001-of-00002.safetensors")
    with raises(r"index\.json", r"expected tensor 'ghost' in model-00001-of-00002\.safetensors, found it nowhere"):
        CheckpointFolder.open(sharded)


def test_index_with_a_tensor_in_another_shard(sharded):
    edit_index(sharded, scale="model-00001-of-00002.safetensors")
    with raises("expected tensor 'scale' in model-00001", r"found it in model-00002-of-00002\.safetensors"):
        CheckpointFolder.open(sharded)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "", ".", "..", "config.json", 3, None])
def test_index_pointing_outside_the_folder(sharded, file):
    edit_index(sharded, scale=file)
    with raises(r"index\.json: tensor 'scale': expected the name of a safetensors file, found "):
        CheckpointFolder.open(sharded)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_index_without_a_map(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    with raises(r"index\.json: expected a non-empty object 'weight_map'"):
        CheckpointFolder.open(sharded)


def test_index_with_a_duplicate(sharded):
    text = '{"weight_map": {"scale": "a.safetensors", "scale": "b.safetensors"}}'
    (sharded / "model.safetensors.index.json").write_text(text)
    with raises(r"index\.json: expected JSON: duplicate entry 'scale'"):
        CheckpointFolder.open(sharded)


def test_tensor_in_two_shards(tmp_path):
    first, second = split("scale", "table")
    write_folder(tmp_path, [first, second | {"scale": TENSORS["scale"]}])
    with raises("tensor 'scale' is in two files", r"model-00001-of-00002\.safetensors and model-00002-of-00002"):
        CheckpointFolder.open(tmp_path)


def test_a_shard_may_hold_a_tensor_that_the_index_leaves_out(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["scale"]
    path.write_text(json.dumps(index))
    assert "scale" in CheckpointFolder.open(sharded).tensors


def test_truncated_file(sharded):
    path = sharded / "model-00002-of-00002.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 3)
    with raises(rf"model-00002.*: truncated: tensor '.*' expected to end at byte \d+, the file has {size - 3}$"):
        CheckpointFolder.open(sharded)


@pytest.mark.parametrize("size", [0, 5, 8, 30])
def test_file_truncated_in_its_header(sharded, size):
    with (sharded / "model-00001-of-00002.safetensors").open("r+b") as file:
        file.truncate(size)
    with raises(r"model-00001-of-00002\.safetensors: (garbage or truncated|expected a safetensors file)"):
        CheckpointFolder.open(sharded)


def test_file_cut_short_after_it_was_opened(tmp_path):
    folder = CheckpointFolder.open(write_folder(tmp_path))
    info = folder.tensors["embed.weight"]
    with info.file.open("r+b") as file:
        file.truncate(info.offset + 10)
    message = r"model\.safetensors: tensor 'embed\.weight' expected 140 bytes from offset \d+, got 10"
    with raises(message):
        folder.read("embed.weight")
    with raises(message):
        list(folder.stream("embed.weight"))
    info.file.unlink()
    with raises("cannot be read for tensor 'embed.weight'"):
        folder.read("embed.weight")


def test_a_tensor_that_is_not_there(tmp_path):
    folder = CheckpointFolder.open(write_folder(tmp_path))
    with raises("no tensor 'ghost' among its 6"):
        folder.read("ghost")


def entry(start, end, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "garbage in its header: Expecting value"),
        (b"\xff\xff", "garbage in its header: 'utf-8'"),
        (b"[" * 100_000, "garbage in its header"),
        (b"[]", "garbage in its header: expected an object, found list"),
        (b'{"a": {}, "a": {}}', "garbage in its header: duplicate entry 'a'"),
        ({"a": 3}, "tensor 'a': expected dtype, shape and data_offsets in the header, found 3"),
        ({"a": {"dtype": "F32"}}, "tensor 'a': expected dtype, shape and data_offsets"),
        ({"a": entry(0, 8, "F4")}, "tensor 'a': expected a dtype of F64, .*BOOL, found 'F4'"),
        ({"a": entry(0, 8, ["F32"])}, "tensor 'a': expected a dtype of"),
        ({"a": entry(0, 8, shape=(-2,))}, r"tensor 'a': expected counts for shape .*found \[-2\]"),
        ({"a": entry(0, 8, shape=(2.0,))}, "tensor 'a': expected counts for shape"),
        ({"a": entry(0, 8) | {"data_offsets": [0]}}, "tensor 'a': expected counts .*two data_offsets"),
        ({"a": entry(0, 12)}, r"tensor 'a': expected 8 bytes for F32 \(2,\), data_offsets give 12"),
        ({"a": entry(8, 0)}, "tensor 'a': expected 8 bytes .*give -8"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, r"tensor 'b': expected its data from byte \d+, found from"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, r"tensor 'b': expected its data from byte \d+, found from"),
        ({"a": entry(0, 8)}, r"expected \d+ bytes by its header, the file has \d+"),
        ({"a": entry(0, 2**62, shape=(2**60,))}, "truncated: tensor 'a' expected to end"),
    ],
)
def test_garbage_header(tmp_path, header, message):
    path = raw_file(tmp_path / "x.safetensors", header, bytes(20))
    with raises(r"x\.safetensors", message):
        read_header(path)


def test_random_bytes(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(np.random.default_rng(0).bytes(4096))
    with raises(r"x\.safetensors: garbage or truncated: \d+ bytes of header announced, 4096 in the file"):
        read_header(path)


def test_jax_is_not_imported():
    code = "import sys, jaxhybrid.checkpoint.safetensors_folder; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
