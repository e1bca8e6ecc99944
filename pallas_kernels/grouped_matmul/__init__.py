"""Mixture-of-experts products: each token through the experts that its router chose."""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import registry
from pallas_kernels.grouped_matmul import gpu, ragged, reference, tpu, xla
from pallas_kernels.grouped_matmul.experts import Activation, ExpertBiases
from pallas_kernels.grouped_matmul.mesh import split_experts

__all__ = ["OPERATOR", "Activation", "ExpertBiases", "routed_experts"]


def _stacked_only(*arguments: Any, **options: Any) -> str | None:
    return "expert weights come as tuples, not stacked" if isinstance(arguments[4], tuple) else None


OPERATOR = registry.Operator(
    "routed_experts",
    (
        registry.Implementation("pallas", tpu.routed_experts, platforms=("tpu",), accepts=tpu.accepts),
        registry.Implementation("pallas", gpu.routed_experts, platforms=("gpu",), accepts=gpu.accepts),
        registry.Implementation("xla", ragged.routed_experts, platforms=("tpu", "gpu"), accepts=_stacked_only),
        registry.Implementation("xla", xla.routed_experts),
        registry.Implementation("reference", reference.routed_experts, automatic=False),
    ),
)


def routed_experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: Float[Array, "*R E I D"] | tuple[Float[Array, "I D"], ...] | None,
    up: Float[Array, "*R E I D"] | tuple[Float[Array, "I D"], ...],
    down: Float[Array, "*R E D I"] | tuple[Float[Array, "D I"], ...],
    valid: Bool[Array, "N"],
    *,
    activation: Activation,
    biases: ExpertBiases | None = None,
    layer: int | Int[Array, ""] | None = None,
) -> Float[Array, "N D"]:
    """sum_j weights[n, j] * down_e(act(gate_e x_n, up_e x_n)) with e = expert_ids[n, j].

    A sparsely gated mixture (Shazeer et al., arXiv:1701.06538) of, as a rule, SwiGLU (Shazeer, arXiv:2002.05202).

    Args:
      x: tokens, any float dtype.
      expert_ids: the k experts of each token, distinct within a token. An id outside 0 to E - 1 adds nothing: that
        expert is another device's.
      weights: their factors, float32.
      gate, up, down: projections stored [out, in], stacked over experts or as tuples of one array per expert. On a CPU
        give tuples: then an expert that no valid token chose is not read, and none is copied. `gate` is None for
        experts without one.
      valid: False for padding, whose output is 0 and whose contents (NaN included) reach nothing.
      activation: (gate product or None, up product) -> inner, float32, elementwise.
      biases: added to the three products, of this layer alone.
      layer: which of R layers' stacks to use; None where the matrices are one layer's.

    Returns:
      The mixture in x's dtype, accumulated in float32.
    """
    arguments = (x, expert_ids, weights, gate, up, down, valid)
    return split_experts(_one_device, *arguments, activation=activation, biases=biases, layer=layer)


def _one_device(*arguments: Any, **options: Any) -> Float[Array, "N D"]:
    return registry.choose(OPERATOR, *arguments, **options)(*arguments, **options)
