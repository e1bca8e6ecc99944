"""Published mixtures of experts for the GPU kernels: what is compiled for Hopper parts, and timed."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import Activation
from pallas_kernels.published_case import LAYERS, array, total_bytes
from pallas_kernels.published_gpu_case import GpuCase


def _swiglu(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


def _squared_relu(_: Any, up: Any) -> Any:
    return jnp.square(jax.nn.relu(up))


def _clamped(gate: Any, up: Any) -> Any:
    """gpt-oss'."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


@dataclass(frozen=True)
class ExpertShape:
    """Experts, how many of them a token chooses, hidden size, inner width, and what is between the products."""

    experts: int
    chosen: int
    width: int
    inner: int
    activation: Activation = _swiglu
    gated: bool = True
    biased: bool = False

    def read(self, tokens: int) -> float:
        """Experts that any of the tokens is to be expected to choose, each of them at random."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)


EXPERTS = {
    "Kimi Linear 48B": ExpertShape(256, 8, 2304, 1024),
    "Qwen3-Next 80B": ExpertShape(512, 10, 2048, 512),
    "Nemotron 3 Nano": ExpertShape(128, 6, 2688, 1856, _squared_relu, gated=False),
    "gpt-oss 120B": ExpertShape(128, 4, 2880, 2880, _clamped, biased=True),
}


def routed_experts_case(
    model: str, shape: ExpertShape, batch: int, tokens: int, dtype: Any = jnp.bfloat16, layers: int = LAYERS
) -> GpuCase:
    """All tokens of a batch through a layer of a stack; the fewest bytes are those of a random choice of experts."""
    rows, experts, width, inner = batch * tokens, shape.experts, shape.width, shape.inner
    into, out_of = (array(layers, experts, *sizes, dtype=dtype) for sizes in ((inner, width), (width, inner)))
    x, inner_bias = array(rows, width, dtype=dtype), array(experts, inner, dtype=dtype)
    arguments = {
        "x": x, "expert_ids": array(rows, shape.chosen, dtype=jnp.int32), "weights": array(rows, shape.chosen),
        **({"gate": into} if shape.gated else {}), "up": into, "down": out_of,
        "valid": array(rows, dtype=jnp.bool_), "layer": array(dtype=jnp.int32),
    }  # fmt: skip
    if shape.biased:
        biases = {"gate_bias": inner_bias, "up_bias": inner_bias, "down_bias": array(experts, width, dtype=dtype)}
        arguments |= biases
    matrices = (2 + shape.gated) * inner * width
    moved = round(shape.read(rows) * matrices) * into.dtype.itemsize + 2 * total_bytes(x)
    options = {"activation": shape.activation, "gated": shape.gated}
    macs = rows * shape.chosen * matrices
    return GpuCase("routed_experts", model, (batch, tokens), options, arguments, (), moved, macs)
