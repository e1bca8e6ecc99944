import json
import math
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxhybrid.checkpoint.orbax_folder import MANIFEST, OrbaxFolder, is_orbax_folder, save_orbax
from jaxhybrid.errors import CheckpointError

Spec = jax.ShapeDtypeStruct
CONFIG = {"model_type": "qwen3", "layers": [1, 2], "limit": math.inf}
FINGERPRINT = "f" * 64


def make_leaves():
    random = np.random.default_rng(0)
    return {
        ("layers", 0, "weight"): jnp.asarray(random.standard_normal((3, 5)), jnp.float32),
        ("layers", 1, "weight"): jnp.asarray(random.standard_normal((4, 7)), jnp.bfloat16),
        ("scale",): jnp.asarray(2.5, jnp.float32),
        ("table",): jnp.arange(11, dtype=jnp.int32),
    }


def specs(leaves):
    return {path: Spec(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "model"
    save_orbax(path, make_leaves(), CONFIG, FINGERPRINT)
    return path


def test_round_trip(saved):
    leaves = make_leaves()
    assert is_orbax_folder(saved)
    folder = OrbaxFolder.open(saved)
    assert folder.config == CONFIG
    assert folder.fingerprint == FINGERPRINT
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in folder.leaves.items()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()
    }
    loaded = folder.load(specs(leaves))
    assert loaded.keys() == leaves.keys()
    for path, leaf in leaves.items():
        assert loaded[path].dtype == leaf.dtype
        np.testing.assert_array_equal(loaded[path], leaf)


def test_leaves_are_cast_to_the_dtype_asked_for(saved):
    leaves = make_leaves()
    wanted = {path: Spec(leaf.shape, jnp.float16 if leaf.ndim == 2 else leaf.dtype) for path, leaf in leaves.items()}
    loaded = OrbaxFolder.open(saved).load(wanted)
    for path, leaf in leaves.items():
        assert loaded[path].dtype == wanted[path].dtype
        np.testing.assert_array_equal(loaded[path], leaf.astype(wanted[path].dtype))


def test_all_problems_are_in_one_error(saved):
    wanted = specs(make_leaves())
    wanted[("layers", 0, "weight")] = Spec((5, 3), jnp.float32)
    wanted[("table",)] = Spec((11,), jnp.float32)
    del wanted["scale",]
    wanted[("layers", 2, "weight")] = Spec((2,), jnp.float32)
    with pytest.raises(CheckpointError) as caught:
        OrbaxFolder.open(saved).load(wanted)
    assert str(caught.value).splitlines() == [
        f"{saved}: 4 problems with its tensors",
        "  leaf layers.2.weight: missing",
        "  leaf scale: unknown, the model doesn't have it",
        "  leaf layers.0.weight: expected shape (5, 3), found (3, 5)",
        "  leaf table: expected a kind of floating, found int32",
    ]


def test_a_finished_checkpoint_is_not_written_over(saved):
    with pytest.raises(CheckpointError, match="expected a new folder, found a finished checkpoint"):
        save_orbax(saved, make_leaves(), CONFIG, FINGERPRINT)


def test_an_unfinished_checkpoint_is_refused_and_can_be_saved_again(tmp_path):
    leaves = {("w",): jnp.arange(3.0)}
    save_orbax(tmp_path, leaves, CONFIG, FINGERPRINT)
    (tmp_path / MANIFEST).unlink()
    assert not is_orbax_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected a file jaxhybrid\.json, found none"):
        OrbaxFolder.open(tmp_path)
    save_orbax(tmp_path, {("w",): jnp.arange(4.0)}, CONFIG, FINGERPRINT)
    loaded = OrbaxFolder.open(tmp_path).load({("w",): Spec((4,), jnp.float32)})
    np.testing.assert_array_equal(loaded["w",], np.arange(4.0))


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        ([("a", 1), ("a", "1")], r"a\.1"),
        ([("a", "b"), ("a.b",)], r"a\.b"),
        ([("a", "b"), ("a",)], "a"),
        ([(), ("a",)], ""),
    ],
)
def test_leaves_that_would_have_one_name(tmp_path, paths, name):
    with pytest.raises(CheckpointError, match=f"leaf '{name}': expected a name of its own"):
        save_orbax(tmp_path / "new", {path: jnp.zeros(2) for path in paths}, CONFIG, FINGERPRINT)
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: cannot be written: .*File exists"):
        save_orbax(tmp_path / "file", {("w",): jnp.zeros(2)}, CONFIG, FINGERPRINT)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("{", r"jaxhybrid\.json: expected JSON"),
        ('{"format": 2}', r"jaxhybrid\.json: expected format 1, found 2"),
        ('{"format": 1, "weights": "f"}', r"jaxhybrid\.json: expected weights and leaves: KeyError\('leaves'\)"),
        ('{"format": 1, "weights": "f", "leaves": [{"path": ["w"], "shape": [2], "dtype": "x"}]}', "data type 'x'"),
        ('{"format": 1, "weights": "f", "leaves": []}', "expected a folder params, found none"),
    ],
)
def test_a_damaged_manifest(tmp_path, manifest, message):
    (tmp_path / MANIFEST).write_text(manifest)
    with pytest.raises(CheckpointError, match=message):
        OrbaxFolder.open(tmp_path)


def test_damaged_parameters(tmp_path):
    save_orbax(tmp_path, {("w",): jnp.arange(3.0)}, CONFIG, FINGERPRINT)
    (tmp_path / "params" / "manifest.ocdbt").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="params: cannot be read: "):
        OrbaxFolder.open(tmp_path).load({("w",): Spec((3,), jnp.float32)})


LOAD_ON_A_MESH = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from jaxhybrid.checkpoint.orbax_folder import OrbaxFolder

    mesh = jax.make_mesh((2,), ("model",))
    folder = OrbaxFolder.open(sys.argv[1])
    wanted = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(*axes)))
        for (path, leaf), axes in zip(folder.leaves.items(), [(), ("model",), (), ()])
    }
    leaves = folder.load(wanted)
    split = leaves["layers", 1, "weight"]
    assert all(leaves[path].sharding == wanted[path].sharding for path in wanted)
    print(json.dumps([[shard.data.shape for shard in split.addressable_shards], np.asarray(split, float).tolist()]))
"""


def test_leaves_saved_on_one_device_are_loaded_on_a_mesh(saved):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOAD_ON_A_MESH), str(saved)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shapes, values = json.loads(done.stdout)
    assert shapes == [[2, 7], [2, 7]]
    np.testing.assert_array_equal(values, np.asarray(make_leaves()["layers", 1, "weight"], float))
