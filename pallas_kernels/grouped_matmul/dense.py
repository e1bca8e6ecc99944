"""Mixture of experts with every expert computed for every token: static shapes and a gradient on any platform.

It does E / k times the multiplications that are needed: for training with few experts.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def swiglu_experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate: Float[Array, "E I D"] | tuple[Float[Array, "I D"], ...],
    up: Float[Array, "E I D"] | tuple[Float[Array, "I D"], ...],
    down: Float[Array, "E D I"] | tuple[Float[Array, "D I"], ...],
    valid: Bool[Array, "N"],
) -> Float[Array, "N D"]:
    """See `pallas_kernels.grouped_matmul.swiglu_experts`."""
    rows = jnp.where(valid[:, None], x, 0)
    weights = jnp.where(valid[:, None], weights, 0)
    out = jnp.zeros(x.shape, jnp.float32)
    for expert in range(len(gate)):
        factor = jnp.where(expert_ids == expert, weights, 0).sum(axis=1, keepdims=True)
        hidden = jax.nn.silu(_product(rows, gate[expert])) * _product(rows, up[expert])
        out += _product((hidden * factor).astype(x.dtype), down[expert])
    return out.astype(x.dtype)


def _product(rows: Float[Array, "N a"], matrix: Float[Array, "b a"]) -> Float[Array, "N b"]:
    return jnp.einsum("na,ba->nb", rows, matrix, preferred_element_type=jnp.float32)
