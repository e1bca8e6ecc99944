"""Which kernels a published model would get on a platform, from its config alone: nothing is loaded or computed."""

import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.checkpoint.json_file import read_json_object
from jaxhybrid.config import FfnSpec, LayerSpec, MixerSpec
from jaxhybrid.layers.context import Execution, LayerContext
from jaxhybrid.layers.indexer import no_choice
from jaxhybrid.layers.mixers import build
from jaxhybrid.layers.step import Step
from jaxhybrid.models import translate
from jaxhybrid.state.arrays import pool_arrays
from jaxhybrid.state.batch import BatchAddress
from jaxhybrid.state.layout import StateDtypes, StateLayout, layout_of
from pallas_kernels import registry

PAGE_SIZE = 128
HEADER = ("program", "operator", "calls", "implementation", "why", "arguments")

Part = tuple[MixerSpec | FfnSpec, str | None]
"""A mixer and its group of state, or a feed-forward: all that operators are called from, and all they depend on."""


def kernel_table(config_path: str | Path, platform: str, shapes: Sequence[tuple[int, int]]) -> list[tuple[str, ...]]:
    """A row for each distinct choice in a step of `rows` sequences of `tokens` tokens, for each (rows, tokens).

    Parts of layers that are alike are traced once and counted as often as they occur. Experts' arguments are shown as
    one stack.

    `platform`: `cpu`, `tpu` or `gpu`; weights and activations are bfloat16 but for `cpu`. Raises CheckpointError for a
    file that holds no JSON object, ConfigError for a config that cannot be translated.
    """
    config = translate(read_json_object(Path(config_path)), str(config_path))
    dtype = "float32" if platform == "cpu" else "bfloat16"
    # Stacked also where a CPU would have a buffer for each expert: its implementation takes both forms, and hundreds of
    # buffers take minutes to trace.
    context = LayerContext(config, Execution(scan_layers=False, stack_experts=True), dtype)
    layout = layout_of(config.layers, StateDtypes("float32", dtype), config.vocab_size)
    parts = Counter(_parts(config.layers, layout))
    modules = {part: nnx.split(nnx.eval_shape(partial(build, part[0], context))) for part in parts}
    table: list[tuple[str, ...]] = []
    for rows, tokens in shapes:
        pages = -(-tokens // PAGE_SIZE) + 1
        pool = jax.eval_shape(partial(pool_arrays, layout, rows + 2, rows * pages + 1, PAGE_SIZE))
        step = jax.eval_shape(partial(_step, rows, tokens, pages))
        handed = jax.eval_shape(partial(no_choice, config.layers, layout), pool, step)
        x = jax.ShapeDtypeStruct((rows, tokens, config.hidden_size), dtype)
        choices: Counter[registry.Choice] = Counter()
        for part, layers in parts.items():
            state = {**pool[part[1]], **handed} if part[1] else None
            graph, parameters = modules[part]
            with registry.target(platform), registry.record() as recorder, warnings.catch_warnings():
                # The table says it.
                warnings.simplefilter("ignore", registry.KernelFallbackWarning)
                jax.eval_shape(partial(_call, graph), parameters, x, state, step)
            choices.update({choice: layers * count for choice, count in recorder.counts().items()})
        table += [
            (f"{rows} x {tokens}", choice.operator, str(count), _implementation(choice), choice.reason, choice.shapes)
            for choice, count in choices.items()
        ]
    return table


def _parts(layers: Sequence[LayerSpec], layout: StateLayout) -> list[Part]:
    """Those of every layer, in their order."""
    both = ([(layer.mixer, group), (layer.ffn, None)] for layer, group in zip(layers, layout.groups, strict=True))
    return [(spec, group) for parts in both for spec, group in parts if spec is not None]


def _call(
    graph: nnx.GraphDef, parameters: nnx.State, x: Float[Array, "B T D"], state: dict[str, Array] | None, step: Step
):
    module = nnx.merge(graph, parameters)
    return module(x, step) if state is None else module(x, state, 0, step)


def _step(rows: int, tokens: int, pages: int) -> Step:
    row = jnp.zeros(rows, jnp.int32)
    address = BatchAddress(row, row, jnp.zeros((rows, pages), jnp.int32), row, row)
    return Step(jnp.zeros((rows, tokens), jnp.int32), address)


def _implementation(choice: registry.Choice) -> str:
    return f"{choice.implementation} (fallback)" if choice.fallback else choice.implementation
