import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxhybrid.checkpoint.json_file import read_json_object
from jaxhybrid.kernel_table import HEADER, PAGE_SIZE, kernel_table
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.decoder import abstract_decoder
from jaxhybrid.models import translate
from jaxhybrid.state.arrays import pool_arrays
from jaxhybrid.state.batch import BatchAddress
from jaxhybrid.state.layout import StateDtypes, layout_of
from pallas_kernels import registry

ROOT = Path(__file__).resolve().parents[1]


def test_calls_are_layers_and_a_refusal_is_shown(tiny_folder):
    """The tiny model has one KDA layer, of heads too narrow for the TPU's kernels, and one MLA layer."""
    table = kernel_table(tiny_folder / "config.json", "tpu", [(1, 70), (3, 1)])
    rows = [dict(zip(HEADER, row, strict=True)) for row in table]
    assert Counter((row["program"], row["operator"]) for row in rows)["3 x 1", "gated_delta"] == 1
    delta = next(row for row in rows if row["operator"] == "gated_delta" and row["program"] == "1 x 70")
    assert (delta["calls"], delta["implementation"]) == ("1", "xla (fallback)")
    assert "key_head_dim 10 is not a multiple of 128" in delta["why"]
    assert "bfloat16[1,70,2,10]" in delta["arguments"]
    whole = next(row for row in rows if row["operator"] == "conv_gated_delta")
    assert (whole["program"], whole["implementation"]) == ("1 x 70", "pallas (fallback)")
    assert "key_head_dim 10 is not a multiple of 128" in whole["why"]


def test_a_cpu_gets_what_it_has(tiny_folder):
    choices = {row[1]: (row[3], row[4]) for row in kernel_table(tiny_folder / "config.json", "cpu", [(1, 70)])}
    assert choices["conv_gated_delta"] == ("xla", "first that runs on cpu; pallas needs tpu; pallas needs tpu or gpu")


def choices_of_the_whole_model(config_path: Path, platform: str, rows: int, tokens: int) -> dict[registry.Choice, int]:
    config = translate(read_json_object(config_path), str(config_path))
    dtype = "float32" if platform == "cpu" else "bfloat16"
    execution = Execution(scan_layers=False, stack_experts=platform != "cpu")
    graph, parameters = nnx.split(abstract_decoder(config, execution, dtype))
    layout = layout_of(config.layers, StateDtypes("float32", dtype), config.vocab_size)
    pages = -(-tokens // PAGE_SIZE) + 1

    def trunk(parameters, tokens, pool, *address):
        return nnx.merge(graph, parameters).trunk(tokens, pool, BatchAddress(*address))

    pool = jax.eval_shape(partial(pool_arrays, layout, rows + 2, rows * pages + 1, PAGE_SIZE))
    row, table = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows, pages), jnp.int32)
    ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    with registry.target(platform), registry.record() as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore", registry.KernelFallbackWarning)
        jax.eval_shape(trunk, parameters, ids, pool, row, row, table, row, row)
    return recorder.counts()


# Layers that share an indexer's choice; streams of several kinds around layers of several; experts on a CPU.
@pytest.mark.parametrize(
    ("golden", "platform"),
    [("glm_moe_dsa_shared", "tpu"), ("deepseek_v4_a", "gpu"), ("kimi_k3_a", "tpu"), ("kimi_k3_a", "cpu")],
)
def test_the_table_is_what_the_whole_model_chooses(golden, platform):
    path = ROOT / "tests" / "goldens" / golden / "config.json"
    whole = choices_of_the_whole_model(path, platform, 2, 5)
    shown = len(HEADER) if platform != "cpu" else len(HEADER) - 1
    expected = [
        (
            "2 x 5", choice.operator, str(count), choice.implementation + " (fallback)" * choice.fallback,
            choice.reason, choice.shapes,
        )[:shown]
        for choice, count in whole.items()
    ]  # fmt: skip
    assert [row[:shown] for row in kernel_table(path, platform, [(2, 5)])] == expected


@pytest.mark.parametrize("name", ["kimi-linear-48b-a3b", "kimi-k3", "deepseek-v4-flash"])
def test_hundreds_of_experts_take_no_minutes(name):
    started = time.perf_counter()
    table = kernel_table(ROOT / "configs" / f"{name}.json", "cpu", [(1, 2048), (64, 1)])
    assert {row[0] for row in table if row[1] == "routed_experts"} == {"1 x 2048", "64 x 1"}
    assert time.perf_counter() - started < 15
