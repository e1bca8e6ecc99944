"""The GPU kernels compile for Hopper parts at published shapes, without spills, and copy no state and no pages.

The two parts differ in memory alone: one of them gets every model, the other one of each operator.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from conftest import installed
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import aot, registry
from pallas_kernels.published_gpu import AttentionShape, SsdShape, gpu_cases, paged_attention_case, ssd_case
from pallas_kernels.published_gpu_experts import EXPERTS, ExpertShape, routed_experts_case
from pallas_kernels.published_gpu_records import record_cases

pytestmark = pytest.mark.aot

RECORDS = {batch: record_cases(batch) for batch in (1, 64, 256)}
KERNELS = {
    "index_top_k": "index_scores", "sparse_latent_attention": "sparse_latent_attention",
    "routed_experts": "routed_experts_out", **{case.operator: case.operator for case in RECORDS[1]},
}  # fmt: skip
DECODE = {batch: gpu_cases(batch, 1, 8192, 131_072) for batch in (1, 64, 256)}
CHECKPOINTED = ("gated_delta", "ssd", "short_conv")
PREFILL = gpu_cases(1, 2048, 8192, 16_384)


def compile_and_check(part, case):
    with registry.record() as recorder:
        compiled = aot.compile_for(part, case.function, *case.arguments.values(), donate=case.donate)
    assert [choice.implementation for choice in recorder.choices()] == ["pallas"]
    text = compiled.as_text()
    assert KERNELS.get(case.operator, f"{case.operator}_{case.form}") in text
    states = [case.arguments[name] for name in case.donated]
    assert compiled.memory_analysis().alias_size_in_bytes == sum(x.size * x.dtype.itemsize for x in states)
    for state in states:
        shape = ",".join(map(str, state.shape))
        assert re.findall(rf"\[{shape}\]\S* (?:copy|transpose|convert)\(", text) == []


def name(case):
    return f"{case.operator}, {case.model}, {case.rows[0]}"


def first_models(cases):
    return list({case.operator: case for case in reversed(cases)}.values())


FORMS = [*first_models(RECORDS[1]), *RECORDS[64], *first_models(RECORDS[256])]


@pytest.mark.parametrize("case", [*PREFILL, *itertools.chain(*DECODE.values()), *FORMS], ids=name)
def test_h200(case):
    compile_and_check(installed("h200"), case)


@pytest.mark.parametrize("case", [*itertools.chain(*map(first_models, (PREFILL, DECODE[64], RECORDS[64])))], ids=name)
def test_h100(case):
    compile_and_check(installed("h100"), case)


OTHER_SHAPES = [
    ssd_case("a state of 256", SsdShape(32, 128, 2, 256), 2, 300),
    paged_attention_case("a group of 3, verify", AttentionShape(24, 8, 128), 8, 4, 5000),
    paged_attention_case("heads of 32", AttentionShape(8, 8, 32), 3, 1, 100),
    routed_experts_case("more experts than 32 bits count bytes", EXPERTS["Kimi Linear 48B"], 1, 2048, layers=26),
    routed_experts_case("widths split by 8", ExpertShape(128, 6, 2688, 232), 64, 1),
]


@pytest.mark.parametrize("case", OTHER_SHAPES, ids=name)
def test_other_shapes(case):
    compile_and_check(installed("h200"), case)


@pytest.mark.parametrize("case", [case for case in PREFILL if case.operator in CHECKPOINTED], ids=name)
def test_prefill_with_checkpoints(case):
    checkpoints = jax.ShapeDtypeStruct((case.rows[0], 4), jnp.int32)

    def call(*arguments):
        *arguments, lengths, slots = arguments
        return case.function(*arguments, checkpoint_lengths=lengths, checkpoint_slots=slots)

    with registry.record() as recorder:
        aot.compile_for(installed("h200"), call, *case.arguments.values(), checkpoints, checkpoints, donate=case.donate)
    assert [choice.implementation for choice in recorder.choices()] == ["pallas"]


def test_a_scan_over_layers_copies_no_experts():
    case = routed_experts_case("Kimi Linear 48B", EXPERTS["Kimi Linear 48B"], 64, 1, layers=26)

    def call(x, *others):
        return jax.lax.scan(lambda x, layer: (x + case.function(x, *others, layer)[0], None), x, jnp.arange(26))[0]

    *arguments, _ = case.arguments.values()
    compiled = aot.compile_for(installed("h200"), call, *arguments)
    text = compiled.as_text()
    assert "routed_experts_in" in text
    assert re.findall(r"= \w+\[(?:1,)?256,(?:1024,2304|2304,1024)\].*", text) == []
    assert compiled.memory_analysis().temp_size_in_bytes < 64 << 20


def compile_kernel(kernel, x, warps):
    def call(x):
        params = triton.CompilerParams(num_warps=warps)
        return pl.pallas_call(kernel, out_shape=x, compiler_params=params, name="wasteful")(x)

    aot.compile_for(installed("h200"), call, x)


def test_a_kernel_that_spills_registers_is_refused():
    def kernel(x, out):
        first = x[...]
        out[...] = jax.lax.fori_loop(0, 10, lambda _, y: jnp.exp(y) * first + y * 1.5, first)

    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compile_kernel(kernel, jax.ShapeDtypeStruct((128, 256), jnp.float32), 8)


def test_a_kernel_that_needs_too_much_shared_memory_is_refused():
    def kernel(x, out):
        out[...] = jnp.dot(x[...], x[...].T, preferred_element_type=jnp.float32).astype(out.dtype)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"[Ss]hared memory"):
        compile_kernel(kernel, jax.ShapeDtypeStruct((512, 512), jnp.bfloat16), 16)
