"""Mixture of experts on TPU: one kernel for an expert's three products, which reads every chosen expert's weights once.

Assignments are sorted by expert, so that a grid step has one tile of rows and one expert, or part of its inner width;
consecutive tiles of one expert find its weights in VMEM. XLA's ragged dot wants matrices stored [in, out] and, in a
scan over layers, a copy of every layer's experts.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul import tpu_few, tpu_many
from pallas_kernels.grouped_matmul.experts import Activation, ExpertBiases, untileable
from pallas_kernels.grouped_matmul.grouping import assigned_here, group_by_expert
from pallas_kernels.grouped_matmul.tpu_expert import Experts


def accepts(
    x: Array, expert_ids: Array, weights: Array, gate: Any, up: Any, down: Any, *_: Any, **options: Any
) -> str | None:
    """Why the kernel cannot run these arguments of `routed_experts`, or None."""
    return untileable(up)


def routed_experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: Float[Array, "*R E I D"] | None,
    up: Float[Array, "*R E I D"],
    down: Float[Array, "*R E D I"],
    valid: Bool[Array, "N"],
    *,
    activation: Activation,
    biases: ExpertBiases | None = None,
    layer: int | Int[Array, ""] | None = None,
    interpret: Any = False,
) -> Float[Array, "N D"]:
    """See `pallas_kernels.grouped_matmul.routed_experts`; `interpret` as of `pallas_call`."""
    if layer is None:
        gate, up, down = gate if gate is None else gate[None], up[None], down[None]
    experts, number = Experts(gate, up, down, biases, activation), jnp.asarray(0 if layer is None else layer, jnp.int32)
    here = assigned_here(expert_ids, valid, up.shape[1])
    grouping = group_by_expert(expert_ids, here, up.shape[1])
    if tpu_few.fits(x):
        out = tpu_few.mixture(x, weights, grouping, experts, number, interpret)
    else:
        out = tpu_many.mixture(x, expert_ids, weights, here, grouping, experts, number, interpret)
    return out.astype(x.dtype)
