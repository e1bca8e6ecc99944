"""Published mixtures of experts: what their TPU kernel is compiled for ahead of time, and counted on."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.grouped_matmul import routed_experts, tpu_expert
from pallas_kernels.published_case import DECODE_BATCHES, LAYERS, PREFILL_TOKENS, Case


@dataclass(frozen=True)
class ExpertModel:
    """Experts on a chip, how many of them a token chooses there, hidden size, inner width."""

    experts: int
    chosen: int
    width: int
    inner: int


EXPERT_MODELS = {
    "Kimi Linear 48B": ExpertModel(256, 8, 2304, 1024),
    "Kimi Linear 48B, a chip of 8": ExpertModel(32, 1, 2304, 1024),
    "Qwen3-Next 80B": ExpertModel(512, 10, 2048, 512),
    "DeepSeek-V3.2, a chip of 32": ExpertModel(8, 1, 7168, 2048),
}


def _swiglu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def routed_experts_case(name: str, tokens: int) -> Case:
    """One call of `routed_experts` on bfloat16 weights of two layers, its tokens shared out evenly."""
    model = EXPERT_MODELS[name]
    assignments = tokens * model.chosen
    used, matrix = min(model.experts, assignments), model.inner * model.width
    rows, block = tpu_expert.tiling(assignments, model.experts, model.inner, model.width, 6 * model.width)
    parts = -(-model.inner // block)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    into = array(LAYERS, model.experts, model.inner, model.width)
    arguments = (
        array(tokens, model.width), array(tokens, model.chosen, dtype=jnp.int32),
        array(tokens, model.chosen, dtype=jnp.float32), into, into,
        array(LAYERS, model.experts, model.width, model.inner), array(tokens, dtype=jnp.bool_),
        array(dtype=jnp.int32),
    )  # fmt: skip
    return Case(
        "routed_experts", name, "decode" if tokens < PREFILL_TOKENS else "prefill", _layer_of_stack, arguments, (),
        tokens, used * -(-assignments // used // rows) * parts, 0,
        2 * (3 * used * matrix + 2 * tokens * model.width), 3 * assignments * matrix,
    )  # fmt: skip


def _layer_of_stack(x, expert_ids, weights, gate, up, down, valid, layer):
    return routed_experts(x, expert_ids, weights, gate, up, down, valid, activation=_swiglu, layer=layer)


def expert_cases() -> list[Case]:
    """What the kernel is counted on."""
    return [
        routed_experts_case(name, tokens) for name in EXPERT_MODELS for tokens in (DECODE_BATCHES[1], PREFILL_TOKENS)
    ]
