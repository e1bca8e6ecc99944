"""Which kernels a published model would get on a platform, from its config alone: nothing is loaded or computed."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxhybrid.checkpoint.json_file import read_json_object
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.decoder import Decoder, abstract_decoder
from jaxhybrid.models import translate
from jaxhybrid.state.arrays import PoolArrays, pool_arrays
from jaxhybrid.state.batch import BatchAddress
from jaxhybrid.state.layout import StateDtypes, layout_of
from pallas_kernels import registry

PAGE_SIZE = 128
HEADER = ("program", "operator", "calls", "implementation", "why", "arguments")


def kernel_table(config_path: str | Path, platform: str, shapes: Sequence[tuple[int, int]]) -> list[tuple[str, ...]]:
    """A row for each distinct choice in a step of `rows` sequences of `tokens` tokens, for each (rows, tokens).

    `platform`: `cpu`, `tpu` or `gpu`; weights and activations are bfloat16 but for `cpu`. Raises ConfigError for a
    config that cannot be translated.
    """
    config = translate(read_json_object(Path(config_path)), str(config_path))
    dtype = "float32" if platform == "cpu" else "bfloat16"
    # Layer by layer rather than as scans: calls then count layers.
    execution = Execution(scan_layers=False, stack_experts=Execution.for_platform(platform).stack_experts)
    graph, parameters = nnx.split(abstract_decoder(config, execution, dtype))
    layout = layout_of(config.layers, StateDtypes("float32", dtype), config.vocab_size)
    table: list[tuple[str, ...]] = []
    for rows, tokens in shapes:
        pages = -(-tokens // PAGE_SIZE) + 1
        pool = jax.eval_shape(partial(pool_arrays, layout, rows + 2, rows * pages + 1, PAGE_SIZE))
        address = jax.eval_shape(partial(_address, rows, pages))
        ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
        with registry.target(platform), registry.record() as recorder, warnings.catch_warnings():
            # The table says it.
            warnings.simplefilter("ignore", registry.KernelFallbackWarning)
            jax.eval_shape(partial(_step, graph), parameters, pool, ids, address)
        name = f"{rows} x {tokens}"
        table += [
            (name, choice.operator, str(count), _implementation(choice), choice.reason, choice.shapes)
            for choice, count in recorder.counts().items()
        ]
    return table


def _step(
    graph: nnx.GraphDef, parameters: nnx.State, pool: PoolArrays, tokens: Int[Array, "B T"], address: BatchAddress
):
    decoder: Decoder = nnx.merge(graph, parameters)
    return decoder.trunk(tokens, pool, address)


def _address(rows: int, pages: int) -> BatchAddress:
    row = jnp.zeros(rows, jnp.int32)
    return BatchAddress(row, row, jnp.zeros((rows, pages), jnp.int32), row, row)


def _implementation(choice: registry.Choice) -> str:
    return f"{choice.implementation} (fallback)" if choice.fallback else choice.implementation
