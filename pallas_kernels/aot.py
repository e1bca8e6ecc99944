"""Compiling for one TPU or GPU on a machine that has none: the real compilers, no device.

Needs the extra `aot`. JAX must have been started with `JAX_PLATFORMS=cpu`.
"""

import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

from pallas_kernels import registry


@dataclass(frozen=True)
class Part:
    """A part to compile for. `slice` is the smallest TPU slice's name, or the name of the GPU target."""

    name: str
    platform: str
    slice: str


TPUS = (
    Part("tpu-v5e", "tpu", "v5e:2x2"),
    Part("tpu-v5p", "tpu", "v5p:2x2x1"),
    Part("tpu-v6e", "tpu", "v6e:2x2"),
    Part("tpu-7x", "tpu", "tpu7x:2x2x1"),
)
GPUS = (Part("h100", "gpu", "H100"), Part("h200", "gpu", "H200"))
PARTS = {part.name: part for part in (*TPUS, *GPUS)}

# XLA's text form of a GpuTargetConfig, with the figures of the data sheets; bandwidth and memory size differ.
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "NVIDIA {name}"
"""
_HOPPER_MEMORY = {"H100": (3_350_000_000_000, 80_000_000_000), "H200": (4_800_000_000_000, 141_000_000_000)}


def why_absent(part: Part) -> str | None:
    """None if the part's compiler is installed, else what is missing."""
    module = "libtpu" if part.platform == "tpu" else "jax_plugins.xla_cuda13"
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"{module} is not installed (extra `aot`)"


@functools.cache
def device(part: Part) -> Any:
    """One device of the part, to compile for."""
    if part.platform == "tpu":
        # libtpu would otherwise ask the cloud which machine this is.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        # There is no device to take turns at, so several processes may compile at once.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        return topologies.get_topology_desc(part.slice, platform="tpu").devices[0]
    bandwidth, memory = _HOPPER_MEMORY[part.slice]
    config = _HOPPER.format(bandwidth=bandwidth, memory=memory, name=part.slice)
    return topologies.get_topology_desc("1x1x1", platform="cuda", target_config=config, topology="1x1x1").devices[0]


def compiler_options(part: Part) -> dict[str, str | bool] | None:
    """On a GPU, a kernel that spills registers is to be an error."""
    return {"xla_gpu_fail_ptx_compilation_on_register_spilling": True} if part.platform == "gpu" else None


def _mesh(part: Part) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array([device(part)]), ("part",))


def tpu_info(part: Part) -> Any:
    """Pallas' figures for a TPU: sizes, bytes and operations per second, each of one core."""
    from jax.experimental.pallas import tpu as pltpu

    with jax.sharding.use_abstract_mesh(_mesh(part).abstract_mesh):
        return pltpu.get_tpu_info()


def compile_for(
    part: Part, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compile `function` for the part. Arguments are `jax.ShapeDtypeStruct`s.

    `donate` numbers those to be donated: states, which come back with the same shape. They are laid out row-major at
    the program's edge, as kernels want them. For a GPU, a kernel that spills registers, or needs more shared memory
    than a multiprocessor has, is an error of the compiler's.
    """
    mesh = _mesh(part)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    donated = {(arguments[number].shape, arguments[number].dtype) for number in donate}

    def placed(x):
        row_major = (x.shape, x.dtype) in donated
        return Format(Layout(tuple(range(x.ndim))), place) if row_major else place

    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed(x)) for x in arguments]
    # Pallas asks the mesh which device it compiles for.
    with registry.target(part.platform), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        places = jax.tree.map(placed, jax.eval_shape(function, *arguments))
        lowered = jax.jit(function, donate_argnums=donate, out_shardings=places).lower(*structs)
        return lowered.compile(compiler_options(part))


_PREFETCH = re.compile(r"copy-start[.\d]* = \((\w+?)(\d+)\[([\d,]+)\]\{[^}]*S\(1\)\}")


def hbm_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes that a TPU program moves between HBM and the cores.

    XLA's cost analysis, less the times it counts an operand that is fetched into VMEM ahead of a kernel: at the
    beginning and at the end of the copy, read and written, besides where the kernel reads it.
    """
    counted = int((compiled.cost_analysis() or {})["bytes accessed"])
    for _, bits, shape in _PREFETCH.findall(compiled.as_text() or ""):
        counted -= 4 * int(bits) // 8 * math.prod(map(int, shape.split(",")))
    return counted
