import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file

from jaxhybrid.checkpoint.fill import WeightRule, fill
from jaxhybrid.checkpoint.safetensors_folder import CheckpointFolder
from jaxhybrid.errors import CheckpointError

Spec = jax.ShapeDtypeStruct

LAYERS, EXPERTS = 3, 2
EXPERT = ("layers", "experts", 0)
NORM = ("layers", "norm")
EMBED = ("embed", "weight")
ABSTRACT = {
    EXPERT: Spec((LAYERS, EXPERTS, 5, 7), jnp.float32),
    NORM: Spec((LAYERS, 11), jnp.float32),
    EMBED: Spec((13, 11), jnp.bfloat16),
}
RULES = [
    *(WeightRule(f"l.{i}.e.{j}", EXPERT, (i, j)) for i in range(LAYERS) for j in range(EXPERTS)),
    *(WeightRule(f"l.{i}.norm", NORM, (i,)) for i in range(LAYERS)),
    WeightRule("embed", EMBED),
]


def make_tensors():
    random = np.random.default_rng(0)
    tensors = {f"l.{i}.e.{j}": random.standard_normal((5, 7)) for i in range(LAYERS) for j in range(EXPERTS)}
    tensors |= {f"l.{i}.norm": random.standard_normal(11) for i in range(LAYERS)}
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    return tensors | {"embed": random.standard_normal((13, 11)).astype(np.float32)}


def open_folder(path, tensors):
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return CheckpointFolder.open(path)


def test_leaves_hold_the_tensors_cast(tmp_path):
    tensors = make_tensors()
    leaves = fill(ABSTRACT, RULES, open_folder(tmp_path, tensors))
    assert leaves.keys() == ABSTRACT.keys()
    for path, spec in ABSTRACT.items():
        assert (leaves[path].shape, leaves[path].dtype) == (spec.shape, spec.dtype)
    for rule in RULES:
        expected = tensors[rule.name].astype(ABSTRACT[rule.path].dtype)
        np.testing.assert_array_equal(leaves[rule.path][rule.index], expected)


def test_a_leaf_lies_in_the_order_of_dimensions_that_is_asked_for(tmp_path):
    where = Format(Layout((1, 0, 3, 2)), SingleDeviceSharding(jax.devices()[0]))
    abstract = {**ABSTRACT, EXPERT: Spec((LAYERS, EXPERTS, 5, 7), jnp.float32, sharding=where)}
    tensors = make_tensors()
    leaves = fill(abstract, RULES, open_folder(tmp_path, tensors))
    assert leaves[EXPERT].format.layout.major_to_minor == (1, 0, 3, 2)
    assert leaves[NORM].format.layout.major_to_minor == (0, 1)
    np.testing.assert_array_equal(leaves[EXPERT][2, 1], tensors["l.2.e.1"].astype(np.float32))


def test_sharded_files_fill_the_same(tmp_path):
    tensors = make_tensors()
    (tmp_path / "config.json").write_text("{}")
    weight_map = {}
    for number in range(4):
        names = sorted(tensors)[number::4]
        save_file({name: tensors[name] for name in names}, tmp_path / f"{number}.safetensors")
        weight_map |= dict.fromkeys(names, f"{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    leaves = fill(ABSTRACT, RULES, CheckpointFolder.open(tmp_path))
    for rule in RULES:
        expected = tensors[rule.name].astype(ABSTRACT[rule.path].dtype)
        np.testing.assert_array_equal(leaves[rule.path][rule.index], expected)


def test_reshape_convert_and_a_fused_tensor(tmp_path):
    conv = np.arange(24, dtype=np.float32).reshape(6, 1, 4)
    fused = np.arange(15, dtype=np.float32).reshape(5, 3)
    folder = open_folder(tmp_path, {"conv": conv, "fused": fused})
    abstract = {
        ("conv",): Spec((6, 4), jnp.float32),
        ("q",): Spec((2, 3), jnp.float32),
        ("k",): Spec((3, 3), jnp.float32),
    }
    rules = [
        WeightRule("conv", ("conv",), shape=(6, 1, 4)),
        WeightRule("fused", ("q",), shape=(5, 3), convert=lambda w: w[:2]),
        WeightRule("fused", ("k",), convert=lambda w: -w[2:].T),
    ]
    leaves = fill(abstract, rules, folder)
    np.testing.assert_array_equal(leaves["conv",], conv[:, 0])
    np.testing.assert_array_equal(leaves["q",], fused[:2])
    np.testing.assert_array_equal(leaves["k",], -fused[2:].T)


def test_scalars_empty_tensors_integers_and_flags(tmp_path):
    tensors = {
        "scalar": np.array([2.5, 3.5], np.float16),
        "empty": np.zeros((0, 3), np.float32),
        "table": np.array([5, -7, 2**31 - 1], np.int64),
        "flag": np.array([True, False]),
    }
    rules = [
        WeightRule("scalar", ("scalar",), (0,), shape=(2,), convert=lambda w: w[0]),
        WeightRule("scalar", ("scalar",), (1,), shape=(2,), convert=lambda w: w[1]),
        *(WeightRule(name, (name,)) for name in ("empty", "table", "flag")),
    ]
    abstract = {
        ("scalar",): Spec((2,), jnp.float32),
        ("empty",): Spec((0, 3), jnp.float32),
        ("table",): Spec((3,), jnp.int32),
        ("flag",): Spec((2,), jnp.bool_),
    }
    leaves = fill(abstract, rules, open_folder(tmp_path, tensors))
    for name, expected in tensors.items():
        np.testing.assert_array_equal(leaves[name,], expected)


def failure(abstract, rules, folder, **options):
    with pytest.raises(CheckpointError) as caught:
        fill(abstract, rules, folder, **options)
    return str(caught.value).splitlines()


def test_all_problems_are_in_one_error(tmp_path):
    tensors = make_tensors()
    del tensors["l.1.norm"]
    tensors["l.2.norm"] = np.zeros(12, np.float32)
    tensors["l.0.e.1"] = np.zeros((5, 7), np.int32)
    tensors["surplus"] = np.zeros(2, np.float32)
    abstract = ABSTRACT | {("head", "weight"): Spec((4, 6), jnp.float32)}
    rules = [*RULES, WeightRule("l.0.norm", ("layers", "bias"))]
    folder = open_folder(tmp_path, tensors)
    head, *lines = failure(abstract, rules, folder)
    assert head == f"{tmp_path}: 6 problems with its tensors"
    assert lines == [
        "  'l.0.norm': its rule names the leaf layers.bias, which the model doesn't have",
        "  leaf head.weight of shape (4, 6): no rule fills",
        "  'l.1.norm': missing",
        "  model.safetensors: 'surplus': unknown, no rule maps it",
        "  model.safetensors: 'l.0.e.1': expected a kind of floating, found int32",
        "  model.safetensors: 'l.2.norm': expected shape (11,), found (12,)",
    ]


def test_parts_of_stacked_leaves_unfilled_outside_or_filled_twice(tmp_path):
    folder = open_folder(tmp_path, make_tensors())
    twice = next(rule for rule in RULES if rule.name == "l.2.norm")
    rules = [rule for rule in RULES if rule.name not in ("l.0.e.1", "l.2.e.0")]
    rules += [WeightRule("l.0.e.1", EXPERT, (3, 0)), WeightRule("l.2.e.0", EXPERT, (-1, 1)), twice]
    assert failure(ABSTRACT, rules, folder)[1:] == [
        "  leaf layers.experts.0 of shape (3, 2, 5, 7): no rule fills at (0, 1), (2, 0)",
        "  leaf layers.experts.0 of shape (3, 2, 5, 7): outside it at (-1, 1), (3, 0)",
        "  leaf layers.norm of shape (3, 11): filled twice at (2,)",
    ]


def test_indices_of_different_or_excessive_lengths(tmp_path):
    folder = open_folder(tmp_path, make_tensors())
    rules = [rule for rule in RULES if rule.name not in ("l.1.norm", "embed")]
    rules += [WeightRule("l.1.norm", NORM, shape=(11,)), WeightRule("embed", EMBED, (0, 0, 0), shape=(13, 11))]
    assert failure(ABSTRACT, rules, folder)[1:] == [
        "  leaf layers.norm of shape (3, 11): its rules have indices of lengths [0, 1]",
        "  leaf embed.weight of shape (13, 11): its rules have indices of lengths [3]",
    ]


def test_a_long_list_is_cut_with_its_count(tmp_path):
    surplus = {f"surplus.{number}": np.zeros(1, np.float32) for number in range(33)}
    lines = failure(ABSTRACT, RULES, open_folder(tmp_path, make_tensors() | surplus))
    assert lines[0].endswith("33 problems with its tensors")
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == "  and 13 more"


def test_ignored_tensors_match_with_their_whole_name(tmp_path):
    tensors = make_tensors() | {"mtp.0.norm": np.zeros(2, np.float32), "x.mtp.1": np.zeros(2, np.float32)}
    folder = open_folder(tmp_path, tensors)
    assert failure(ABSTRACT, RULES, folder, ignore=[r"mtp\..*"])[1:] == [
        "  model.safetensors: 'x.mtp.1': unknown, no rule maps it"
    ]
    assert fill(ABSTRACT, RULES, folder, ignore=[r"mtp\..*", r"x\..*"]).keys() == ABSTRACT.keys()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tmp_path, bad):
    tensors = make_tensors()
    tensors["l.1.norm"][4] = bad
    tensors["embed"][12, 10] = bad
    folder = open_folder(tmp_path, tensors)
    assert failure(ABSTRACT, RULES, folder) == [
        f"{tmp_path}: 2 problems with its tensors",
        "  model.safetensors: 'embed': expected finite values of bfloat16",
        "  model.safetensors: 'l.1.norm': expected finite values of float32",
    ]
    leaves = fill(ABSTRACT, RULES, folder, check_finite=False)
    np.testing.assert_array_equal(leaves[NORM][1, 4], np.float32(bad))


def test_values_that_do_not_fit_the_dtype(tmp_path):
    folder = open_folder(tmp_path, {"w": np.array([1.0, 1e6], np.float32), "t": np.array([2**31], np.int64)})
    abstract = {("w",): Spec((2,), jnp.float16), ("t",): Spec((1,), jnp.int32)}
    assert failure(abstract, [WeightRule(name, (name,)) for name in "wt"], folder)[1:] == [
        "  model.safetensors: 't': expected values that fit int32, found int64 beyond it",
        "  model.safetensors: 'w': expected finite values of float16",
    ]


def test_conversions_that_do_not_fit(tmp_path):
    folder = open_folder(tmp_path, {name: np.ones((3, 4), np.float32) for name in "abc"})
    abstract = {(name,): Spec((4, 3), jnp.float32) for name in "abc"}
    rules = [
        WeightRule("a", ("a",), convert=lambda w: w[:, :2]),
        WeightRule("b", ("b",), shape=(3, 4), convert=lambda w: w[:2]),
        WeightRule("c", ("c",), shape=(3, 4), convert=lambda w: w.astype(np.int32)),
    ]
    assert failure(abstract, rules, folder)[1:] == [
        "  model.safetensors: 'a': expected shape (4, 3) once converted, got (3, 2)",
        "  model.safetensors: 'b': expected shape (4, 3) once converted, got (2, 4)",
        "  model.safetensors: 'c': expected a kind of floating once converted, got int32",
    ]


def test_a_file_cut_short_meanwhile(tmp_path):
    folder = open_folder(tmp_path, make_tensors())
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(folder.tensors["l.0.norm"].offset + 3)
    with pytest.raises(CheckpointError, match=r"tensor 'l\.0\.norm' expected 22 bytes from offset \d+, got 3"):
        fill(ABSTRACT, RULES, folder)


def run_python(code, *arguments, **environment):
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env=env, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MEASURE_MEMORY = """
    import json, sys
    import jax, jax.numpy as jnp
    from jaxhybrid.checkpoint.fill import WeightRule, fill
    from jaxhybrid.checkpoint.safetensors_folder import CheckpointFolder

    def memory(field):
        line = next(line for line in open("/proc/self/status") if line.startswith(field))
        return int(line.split()[1]) * 1024

    def load(path, layers, shape, vocabulary):
        abstract = {
            ("w",): jax.ShapeDtypeStruct((layers, *shape), jnp.float32),
            ("e",): jax.ShapeDtypeStruct((vocabulary, shape[1]), jnp.float32),
        }
        rules = [*(WeightRule(f"w.{i}", ("w",), (i,)) for i in range(layers)), WeightRule("e", ("e",))]
        return fill(abstract, rules, CheckpointFolder.open(path))

    load(sys.argv[1], 2, (3, 5), 7)  # what the libraries take for themselves
    before = memory("VmRSS")
    leaves = load(sys.argv[2], 64, (384, 2048), 4096)
    sums = [float(leaf.sum()) for leaf in leaves.values()]
    print(json.dumps([memory("VmHWM") - before, sum(leaf.nbytes for leaf in leaves.values()), *sums]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory's peak from /proc")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_peak_host_memory_is_the_model_and_two_of_its_largest_tensors(tmp_path, dtype):
    for name, layers, shape, vocabulary in (("small", 2, (3, 5), 7), ("large", 64, (384, 2048), 4096)):
        (tmp_path / name).mkdir()
        tensors = {f"w.{i}": np.full(shape, i % 2, dtype) for i in range(layers)}
        open_folder(tmp_path / name, tensors | {"e": np.full((vocabulary, shape[1]), 1, dtype)})
    peak, model, *sums = run_python(MEASURE_MEMORY, tmp_path / "small", tmp_path / "large")
    largest = 4096 * 2048 * 4
    assert sorted(sums) == [4096 * 2048, 32 * 384 * 2048]
    assert model == 64 * 384 * 2048 * 4 + largest
    assert model < peak < model + 2 * largest


FILL_A_MESH = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from jaxhybrid.checkpoint.fill import WeightRule, fill
    from jaxhybrid.checkpoint.safetensors_folder import CheckpointFolder

    mesh = jax.make_mesh((2, 2), ("expert", "model"), axis_types=(jax.sharding.AxisType[sys.argv[2]],) * 2)
    def leaf(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))
    abstract = {
        ("w",): leaf((3, 4, 6, 10), None, "expert", None, "model"),
        ("n",): leaf((3, 8), None, ("expert", "model")),
        ("r",): leaf((5, 7)),
    }
    rules = [
        *(WeightRule(f"w.{i}.{j}", ("w",), (i, j)) for i in range(3) for j in range(4)),
        *(WeightRule(f"n.{i}", ("n",), (i,)) for i in range(3)),
        WeightRule("r", ("r",)),
    ]
    folder = CheckpointFolder.open(sys.argv[1])
    leaves = fill(abstract, rules, folder)
    print(json.dumps({
        "sharded": all(leaves[path].sharding == abstract[path].sharding for path in abstract),
        "shards": {path[0]: leaf.addressable_shards[3].data.shape for path, leaf in leaves.items()},
        "equal": all((np.asarray(leaves[rule.path])[rule.index] == folder.read(rule.name)).all() for rule in rules),
    }))
"""


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_leaves_on_a_mesh(tmp_path, axis_type):
    random = np.random.default_rng(1)
    tensors = {f"w.{i}.{j}": random.standard_normal((6, 10)) for i in range(3) for j in range(4)}
    tensors |= {f"n.{i}": random.standard_normal(8) for i in range(3)} | {"r": random.standard_normal((5, 7))}
    open_folder(tmp_path, {name: value.astype(np.float32) for name, value in tensors.items()})
    seen = run_python(FILL_A_MESH, tmp_path, axis_type, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert seen == {"sharded": True, "shards": {"w": [3, 2, 6, 5], "n": [3, 2], "r": [5, 7]}, "equal": True}
