"""Whole decode loops of published models compile for a TPU slice and a GPU, donated arrays updated where they lie."""

import dataclasses
import math
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import installed
from flax import nnx
from jax.experimental import topologies
from jax.experimental.layout import Format

from jaxhybrid.checkpoint.json_file import read_json_object
from jaxhybrid.engine.programs import decode
from jaxhybrid.engine.sampling import SamplingControls, SamplingMode
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.decoder import abstract_decoder
from jaxhybrid.models import translate
from jaxhybrid.parallel.fitting import fit_to_mesh
from jaxhybrid.parallel.mesh import make_mesh, partition_of
from jaxhybrid.parallel.sharding import parameter_struct, pool_places
from jaxhybrid.platform import compiler_options
from jaxhybrid.state.arrays import leaf_shape
from jaxhybrid.state.batch import BatchAddress
from jaxhybrid.state.layout import StateDtypes, layout_of
from pallas_kernels import aot, registry
from pallas_kernels.partition import Partition

pytestmark = pytest.mark.aot

CONFIGS = Path(__file__).parents[2] / "configs"
ROWS, SLOTS, PAGES, PAGE_SIZE, STEPS = 64, 130, 4097, 64, 4


def partition_for(part: aot.Part, **sizes: int) -> Partition:
    chips = math.prod(sizes.values())
    aot.device(part)
    tpus = part.platform == "tpu"
    devices = topologies.get_topology_desc(part.slice, platform="tpu").devices[:chips] if tpus else [aot.device(part)]
    mesh = make_mesh(**sizes, devices=devices)
    return partition_of(mesh) or Partition(mesh, ())


def compile_decode(part: aot.Part, name: str, layers: int, chips: int):
    """The engine's decode loop over the first layers. Returns the program, its kernels, and the pool's bytes a chip."""
    path = CONFIGS / f"{name}.json"
    config = translate(read_json_object(path), str(path))
    config = dataclasses.replace(config, layers=config.layers[:layers], mtp_layers=(), vision=None)
    config, partition = fit_to_mesh(config, partition_for(part, model=chips))
    assert partition is not None
    graph, parameters = nnx.split(
        abstract_decoder(config, Execution.for_platform(part.platform), "bfloat16", partition)
    )
    structs = [
        (at, each.replace(parameter_struct(each, partition, part.platform)))
        for at, each in nnx.to_flat_state(parameters)
    ]
    layout = layout_of(config.layers, StateDtypes("float32", "bfloat16"), config.vocab_size)
    places, pool, size = pool_places(layout, partition, part.platform), {}, 0
    assert places is not None
    for leaf in layout.leaves:
        shape, place = leaf_shape(leaf, SLOTS, PAGES, PAGE_SIZE), places[leaf.group][leaf.name]
        pool.setdefault(leaf.group, {})[leaf.name] = jax.ShapeDtypeStruct(shape, jnp.dtype(leaf.dtype), sharding=place)
        sharding = place.sharding if isinstance(place, Format) else place
        size += math.prod(sharding.shard_shape(shape)) * np.dtype(leaf.dtype).itemsize

    def array(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=partition.sharding((), ()))

    row, real = array(ROWS), array(ROWS, dtype="float32")
    address = BatchAddress(row, row, array(ROWS, 128), row, row)
    controls = SamplingControls(real, row, real, real, real, real, real, array(ROWS, 2), row)
    function = partial(decode, graph, STEPS, SamplingMode(random=False, filtered=False, penalised=False))
    arguments = (nnx.from_flat_state(structs), pool, address, row, array(ROWS, STEPS), controls, None)
    with registry.target(part.platform), registry.record() as recorder:
        jitted = jax.jit(function, donate_argnums=1, out_shardings=(None, places))
        options = {**(aot.compiler_options(part) or {}), **compiler_options(part.platform)}
        compiled = jitted.lower(*arguments).compile(options)
    return compiled, {choice.operator: choice.implementation for choice in recorder.choices()}, size


def vocabulary(name: str) -> int:
    path = CONFIGS / f"{name}.json"
    return translate(read_json_object(path), str(path)).vocab_size


MODELS = [
    ("kimi-linear-48b-a3b", 9, 4, {"short_conv", "gated_delta", "latent_attention", "routed_experts"}),
    ("qwen3-next-80b-a3b", 8, 4, {"short_conv", "gated_delta", "paged_attention", "routed_experts"}),
    ("nemotron-3-nano-30b-a3b", 8, 2, {"short_conv", "ssd", "paged_attention", "routed_experts"}),
    ("gpt-oss-120b", 4, 4, {"paged_attention", "routed_experts"}),
]


@pytest.mark.parametrize(("name", "layers", "chips", "operators"), MODELS)
def test_a_decode_loop_runs_in_kernels_and_copies_neither_state_nor_experts(name, layers, chips, operators):
    compiled, kernels, pool = compile_decode(installed("tpu-v6e"), name, layers, chips)
    memory = compiled.memory_analysis()
    assert kernels == dict.fromkeys(operators, "pallas")
    assert memory.alias_size_in_bytes >= pool
    # All states of one leaf, or one layer's experts, would be more.
    assert memory.temp_size_in_bytes < 64 << 20
    # A copy between memories is `copy-start`: the compiler keeps arrays of few slots in VMEM.
    assert re.findall(rf"= \w+\[(?:\d+,)?(?:{SLOTS}|{PAGES}),.* copy\(.*", compiled.as_text()) == []


@pytest.mark.parametrize(("name", "layers", "_", "operators"), MODELS)
def test_a_decode_loop_on_a_gpu_copies_neither_state_nor_weights(name, layers, _, operators):
    compiled, kernels, pool = compile_decode(installed("h200"), name, layers, 1)
    memory = compiled.memory_analysis()
    assert kernels == dict.fromkeys(operators, "pallas")
    assert memory.alias_size_in_bytes >= pool
    # Besides the rows' logits. One layer's projections are more, its experts 2.5 GB and more.
    assert memory.temp_size_in_bytes - ROWS * 4 * vocabulary(name) < 48 << 20
