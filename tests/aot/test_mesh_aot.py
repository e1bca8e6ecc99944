"""On a TPU slice the kernels run on each device's heads, and nothing goes from device to device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import installed
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh

from pallas_kernels import aot, registry
from pallas_kernels.conv_gated_delta import conv_gated_delta
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.partition import Partition, partitioned

pytestmark = pytest.mark.aot


def test_the_gated_delta_kernel_runs_on_each_devices_heads(tpu: aot.Part) -> None:
    """Qwen3-Next's 16 key and 32 value heads on four devices, one token of eight rows."""
    aot.device(tpu)
    devices = topologies.get_topology_desc(tpu.slice, platform="tpu").devices[:4]
    partition = Partition(Mesh(np.array(devices), ("model",)), (("heads", ("model",)),))

    def argument(names: tuple[str | None, ...], *shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=partition.sharding(names, shape))

    heads, slots = (None, None, "heads"), argument((), 8, dtype="int32")
    q, v = argument(heads, 8, 1, 16, 128), argument(heads, 8, 1, 32, 128)
    state = argument(heads, 3, 20, 32, 128, 128)
    gates = argument(heads, 8, 1, 32)
    with registry.target("tpu"), partitioned(partition):
        jitted = jax.jit(lambda *arguments: gated_delta(*arguments[:6], 1, *arguments[6:]), donate_argnums=5)
        compiled = jitted.lower(q, q, v, gates, gates, state, slots, slots, slots).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert "gated_delta_decode" in text
    assert re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", text) == []
    assert memory.alias_size_in_bytes == 3 * 20 * 32 * 128 * 128  # a fourth of the state's bytes: updated where it lies


def test_a_prefill_of_kda_runs_on_each_devices_heads() -> None:
    """Kimi Linear's 32 heads on four devices: q, k and v come as one array, each split between heads."""
    part = installed("tpu-v6e")
    aot.device(part)
    devices = topologies.get_topology_desc(part.slice, platform="tpu").devices[:4]
    partition = Partition(Mesh(np.array(devices), ("model",)), (("heads", ("model",)),))

    def argument(names: tuple[str | None, ...], *shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=partition.sharding(names, shape))

    heads, slots = (None, None, "heads"), argument((), 2, dtype="int32")
    # Row-major, as the pool's arrays are.
    conv = argument((None, *heads), 3, 20, 3, 4096)
    layout = Format(Layout((0, 1, 2, 3)), conv.sharding)
    conv = jax.ShapeDtypeStruct(conv.shape, conv.dtype, sharding=layout)
    state = argument(heads, 3, 20, 32, 128, 128, dtype="float32")
    arguments = (
        argument((None, *heads), 2, 300, 3, 4096), argument((None, "heads", None), 3, 4096, 4), (conv,) * 3,
        argument(heads, 2, 300, 32, 128, dtype="float32"), argument(heads, 2, 300, 32, dtype="float32"), state,
    )  # fmt: skip
    with registry.target("tpu"), partitioned(partition):
        jitted = jax.jit(
            lambda *arguments: conv_gated_delta(*arguments[:6], 1, *arguments[6:]),
            donate_argnums=(2, 5), out_shardings=(None, (layout,) * 3, state.sharding),
        )  # fmt: skip
        compiled = jitted.lower(*arguments, slots, slots, slots).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert "conv_gated_delta_prefill" in text
    assert re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", text) == []
    # A fourth of the states' bytes, rows of three taken as four: updated where they lie.
    assert memory.alias_size_in_bytes >= 3 * 20 * 8 * 128 * 128 * 4 + 3 * 3 * 20 * 3 * 1024 * 2


def test_attention_over_pages_runs_on_each_devices_heads() -> None:
    """Qwen3.5 27B's 24 query and 4 key heads of 256 on four devices, whose pages hold one head each."""
    part = installed("tpu-v6e")
    aot.device(part)
    devices = topologies.get_topology_desc(part.slice, platform="tpu").devices[:4]
    partition = Partition(Mesh(np.array(devices), ("model",)), (("heads", ("model",)),))

    def argument(names: tuple[str | None, ...], *shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=partition.sharding(names, shape))

    heads, rows = (None, None, "heads"), argument((), 8, dtype="int32")
    q, k = argument(heads, 8, 1, 24, 256), argument(heads, 8, 1, 4, 256)
    pages, table = argument((None, *heads), 3, 65, 64, 4 * 256), argument((), 8, 16, dtype="int32")
    # Row-major, as the pool's arrays are.
    layout = Format(Layout((0, 1, 2, 3)), pages.sharding)
    pages = jax.ShapeDtypeStruct(pages.shape, pages.dtype, sharding=layout)
    with registry.target("tpu"), partitioned(partition):
        jitted = jax.jit(
            lambda q, k, v, k_pages, v_pages, *rest: paged_attention(q, k, v, k_pages, v_pages, 1, *rest, scale=0.06),
            donate_argnums=(3, 4),
            out_shardings=(None, layout, layout),
        )
        compiled = jitted.lower(q, k, k, pages, pages, table, rows, rows).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert "paged_attention_decode" in text
    assert re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", text) == []
    assert memory.alias_size_in_bytes == 2 * 3 * 65 * 64 * 256 * 2  # a fourth of the pages: written where they lie
