"""A parameter tree as an Orbax checkpoint, beside its config and what it is known by.

The folder holds `config.json`, `params/` (written by Orbax) and `jaxhybrid.json` (the weights' fingerprint and every
leaf's path, dtype and shape), which is written last: a folder without it was not finished.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jaxhybrid.checkpoint.fill import LeafPath, Leaves
from jaxhybrid.checkpoint.json_file import read_json_object, write_json_object
from jaxhybrid.checkpoint.problems import dtype_kind, raise_problems, show_path
from jaxhybrid.checkpoint.safetensors_folder import CONFIG, read_config
from jaxhybrid.errors import CheckpointError

MANIFEST = "jaxhybrid.json"
PARAMS = "params"

_FORMAT = 1


@dataclass(frozen=True, eq=False)
class OrbaxFolder:
    """An opened Orbax folder: config, the weights' fingerprint, and the leaves' dtypes and shapes. Holds no data."""

    path: Path
    config: Mapping[str, Any]
    fingerprint: str
    leaves: Mapping[LeafPath, jax.ShapeDtypeStruct]

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read what `save_orbax` wrote beside the parameters.

        Raises `CheckpointError` when there is no such folder, its saving was interrupted, or a file is damaged.
        """
        folder = Path(path)
        manifest = read_json_object(folder / MANIFEST)
        if manifest.get("format") != _FORMAT:
            raise CheckpointError(f"{folder / MANIFEST}: expected format {_FORMAT}, found {manifest.get('format')!r}")
        try:
            fingerprint = str(manifest["weights"])
            leaves = {
                tuple(leaf["path"]): jax.ShapeDtypeStruct(tuple(leaf["shape"]), jax.numpy.dtype(leaf["dtype"]))
                for leaf in manifest["leaves"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / MANIFEST}: expected weights and leaves: {error!r}") from error
        if not (folder / PARAMS).is_dir():
            raise CheckpointError(f"{folder}: expected a folder {PARAMS}, found none")
        return cls(folder, read_config(folder), fingerprint, leaves)

    def load(self, abstract: Mapping[LeafPath, jax.ShapeDtypeStruct]) -> Leaves:
        """The leaves of `abstract`, read straight to their dtype and sharding (by default the first device).

        Raises one `CheckpointError` naming all leaves that are missing, unknown, misshapen or of another kind of
        dtype, or when Orbax cannot read the data. Orbax keeps no checksum of the data itself: a changed byte inside an
        array goes unseen here.
        """
        import orbax.checkpoint as ocp

        raise_problems(_problems(self.leaves, abstract), self.path)
        default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = {
            path: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=spec.sharding or default)
            for path, spec in abstract.items()
        }
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                tree = checkpointer.restore((self.path / PARAMS).absolute(), _nest(target))
        except Exception as error:  # Orbax and TensorStore raise many types, some of them their own
            raise CheckpointError(f"{self.path / PARAMS}: cannot be read: {error}") from error
        # Orbax knows devices but no order of dimensions.
        return {
            path: jax.device_put(_at(tree, path), spec.format) if spec.format.layout else _at(tree, path)
            for path, spec in abstract.items()
        }


def is_orbax_folder(path: str | Path) -> bool:
    """Whether `save_orbax` finished writing there."""
    return (Path(path) / MANIFEST).is_file()


def save_orbax(
    path: str | Path, leaves: Mapping[LeafPath, Shaped[Array, "..."]], config: Mapping[str, Any], fingerprint: str
) -> None:
    """Save a parameter tree and its config in a folder, which is made if need be.

    fingerprint: what these weights are known by (`fingerprint.weights_fingerprint` of where they come from).
    On several hosts every process calls it.
    Raises `CheckpointError` when the folder holds a finished checkpoint, two leaves would have one name, or it cannot
    be written.
    """
    import orbax.checkpoint as ocp

    folder = Path(path)
    if is_orbax_folder(folder):
        raise CheckpointError(f"{folder}: expected a new folder, found a finished checkpoint")
    _check_names(leaves, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((folder / PARAMS).absolute(), _nest(leaves), force=True)
        if jax.process_index() == 0:
            write_json_object(folder / CONFIG, config)
            write_json_object(folder / MANIFEST, _manifest(leaves, fingerprint))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error


def _manifest(leaves: Mapping[LeafPath, Shaped[Array, "..."]], fingerprint: str) -> dict[str, Any]:
    described = [
        {"path": path, "dtype": np.dtype(leaf.dtype).name, "shape": leaf.shape} for path, leaf in leaves.items()
    ]
    return {"format": _FORMAT, "weights": fingerprint, "leaves": described}


def _problems(
    stored: Mapping[LeafPath, jax.ShapeDtypeStruct], wanted: Mapping[LeafPath, jax.ShapeDtypeStruct]
) -> list[str]:
    problems = [f"leaf {show_path(path)}: missing" for path in wanted if path not in stored]
    problems += [f"leaf {show_path(path)}: unknown, the model doesn't have it" for path in stored if path not in wanted]
    for path in (path for path in wanted if path in stored):
        found, spec = stored[path], wanted[path]
        if found.shape != spec.shape:
            problems.append(f"leaf {show_path(path)}: expected shape {spec.shape}, found {found.shape}")
        if dtype_kind(found.dtype) != dtype_kind(spec.dtype):
            problems.append(f"leaf {show_path(path)}: expected a kind of {dtype_kind(spec.dtype)}, found {found.dtype}")
    return problems


# Orbax names a leaf by its keys joined with dots, as text: nested dicts of text keys go in and come out unchanged.


def _check_names(leaves: Mapping[LeafPath, Any], folder: Path) -> None:
    names = Counter(show_path(path) for path in leaves)
    inner = {show_path(path[:depth]) for path in leaves for depth in range(len(path))}
    clashes = sorted(name for name, count in names.items() if count > 1 or name in inner)
    raise_problems([f"leaf {name!r}: expected a name of its own" for name in clashes], folder)


def _nest(leaves: Mapping[LeafPath, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = leaf
    return tree


def _at(tree: Mapping[str, Any], path: LeafPath) -> Any:
    for key in path:
        tree = tree[str(key)]
    return tree
