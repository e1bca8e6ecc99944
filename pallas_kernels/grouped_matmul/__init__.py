"""Mixture-of-experts products: each token through the experts that its router chose."""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import registry
from pallas_kernels.grouped_matmul import dense, ragged, reference, xla


def _stacked_only(*arguments: Any, **options: Any) -> str | None:
    return "expert weights come as tuples, not stacked" if isinstance(arguments[3], tuple) else None


def _inference_only(*arguments: Any, differentiable: bool = False) -> str | None:
    return "its loop over data-dependent blocks has no gradient" if differentiable else None


OPERATOR = registry.Operator(
    "swiglu_experts",
    (
        registry.Implementation("xla", ragged.swiglu_experts, platforms=("tpu", "gpu"), accepts=_stacked_only),
        registry.Implementation("xla", xla.swiglu_experts, accepts=_inference_only),
        registry.Implementation("dense", dense.swiglu_experts),
        registry.Implementation("reference", reference.swiglu_experts, automatic=False),
    ),
)


def swiglu_experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: Float[Array, "E I D"] | tuple[Float[Array, "I D"], ...],
    up: Float[Array, "E I D"] | tuple[Float[Array, "I D"], ...],
    down: Float[Array, "E D I"] | tuple[Float[Array, "D I"], ...],
    valid: Bool[Array, "N"],
    *,
    differentiable: bool = False,
) -> Float[Array, "N D"]:
    """sum_j weights[n, j] * down_e(silu(gate_e x_n) * up_e x_n) with e = expert_ids[n, j].

    SwiGLU (Shazeer, arXiv:2002.05202) in a sparsely gated mixture (Shazeer et al., arXiv:1701.06538).

    Args:
      x: tokens, any float dtype.
      expert_ids: the k experts of each token, 0 <= id < E, distinct within a token.
      weights: their factors, float32.
      gate, up, down: projections stored [out, in], stacked over experts or as tuples of one array per expert. On a CPU
        give tuples: then an expert that no valid token chose is not read, and none is copied.
      valid: False for padding, whose output is 0 and whose contents (NaN included) reach nothing.
      differentiable: ask for an implementation with a gradient.

    Returns:
      The mixture in x's dtype, accumulated in float32.
    """
    arguments = (x, expert_ids, weights, gate, up, down, valid)
    run = registry.choose(OPERATOR, *arguments, differentiable=differentiable)
    return run(*arguments)
