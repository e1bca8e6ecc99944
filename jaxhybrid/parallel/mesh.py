"""A mesh of devices, and which of its axes splits what."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxhybrid.errors import ConfigError
from pallas_kernels.partition import Partition

# Logical axes of parameters, state and activations, and the mesh axes that each is split over.
MESH_AXES = {
    "rows": ("data",),
    "heads": ("expert", "model"),
    "kv_heads": ("expert", "model"),
    "mlp": ("expert", "model"),
    "vocab": ("expert", "model"),
    "experts": ("expert",),
    "expert_mlp": ("model",),
}


def make_mesh(data: int = 1, model: int = 1, expert: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh [data, expert, model] over the first data * expert * model devices (by default of all of them).

    `model` and `expert`: tensor parallelism. Heads, the state they keep, inner widths and the vocabulary are split over
    both; of experts, the inner width over `model`, whole ones over `expert`. `data`: the rows of a batch are, wherever
    they need no state (see ARCHITECTURE.md).
    Raises ConfigError if there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    wanted = data * expert * model
    if min(data, expert, model) < 1 or wanted > len(devices):
        raise ConfigError(f"a mesh of {data=} x {expert=} x {model=} needs {wanted} devices, found {len(devices)}")
    return Mesh(np.array(devices[:wanted]).reshape(data, expert, model), ("data", "expert", "model"))


def partition_of(mesh: Mesh | None) -> Partition | None:
    """What the mesh splits; None for one device. Raises ConfigError for a mesh with other axes than `make_mesh` names.

    Its axes become ones that the compiler may use as it likes, whatever kind they were.
    """
    if mesh is None or mesh.size == 1:
        return None
    known = {axis for axes in MESH_AXES.values() for axis in axes}
    unknown = [name for name in mesh.axis_names if name not in known]
    if unknown:
        raise ConfigError(f"expected a mesh with axes among {', '.join(sorted(known))}, got {', '.join(unknown)}")
    present = {name: tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1) for name, axes in MESH_AXES.items()}
    return Partition(Mesh(mesh.devices, mesh.axis_names), tuple((name, axes) for name, axes in present.items() if axes))
