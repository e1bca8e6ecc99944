"""Feed-forward layers: SwiGLU (arXiv 2002.05202) and a mixture of SwiGLU experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxhybrid.config import DenseSpec, MoeSpec
from jaxhybrid.layers.linear import Linear, StackedLinear
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.layers.router import route
from pallas_kernels.grouped_matmul import swiglu_experts


class Dense(nnx.Module):
    """W_down (silu(W_gate x) * W_up x)."""

    def __init__(self, spec: DenseSpec, hidden: int, dtype: DTypeLike) -> None:
        self.gate_up_proj = StackedLinear(2, hidden, spec.intermediate_size, "mlp", dtype)
        self.down_proj = Linear(spec.intermediate_size, hidden, (None, "mlp"), dtype)

    def __call__(self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
        both = self.gate_up_proj(x)
        return self.down_proj(jax.nn.silu(both[..., 0, :]) * both[..., 1, :])


class ExpertMatrices(nnx.Module):
    """One matrix per expert: a stack [E, out, in], or E separate ones, of which only the chosen are ever read."""

    def __init__(
        self, count: int, shape: tuple[int, int], axes: tuple[str | None, str | None], stacked: bool, dtype: DTypeLike
    ) -> None:
        if stacked:
            self.weight = parameter((count, *shape), ("experts", *axes), dtype)
        else:
            self.experts = nnx.List([parameter(shape, axes, dtype) for _ in range(count)])
        self.stacked = stacked

    def __call__(self) -> Float[Array, "E out features"] | tuple[Float[Array, "out features"], ...]:
        return self.weight[...] if self.stacked else tuple(expert[...] for expert in self.experts)


class MixtureOfExperts(nnx.Module):
    """sum_k w_k expert_k(x), plus the shared expert's output, gated if the spec says so."""

    def __init__(self, spec: MoeSpec, hidden: int, stack_experts: bool, dtype: DTypeLike) -> None:
        self.spec = spec
        inner = (spec.moe_intermediate_size, hidden)
        self.router = Linear(hidden, spec.num_experts, (None, None), jnp.float32)
        if spec.scoring == "sigmoid":
            self.e_score_correction_bias = parameter((spec.num_experts,), (None,), jnp.float32)
        self.gate_proj = ExpertMatrices(spec.num_experts, inner, ("mlp", None), stack_experts, dtype)
        self.up_proj = ExpertMatrices(spec.num_experts, inner, ("mlp", None), stack_experts, dtype)
        self.down_proj = ExpertMatrices(spec.num_experts, inner[::-1], (None, "mlp"), stack_experts, dtype)
        if spec.shared_intermediate_size:
            self.shared_expert = Dense(DenseSpec(spec.shared_intermediate_size), hidden, dtype)
        if spec.shared_expert_gate:
            self.shared_expert_gate = Linear(hidden, 1, (None, None), dtype)

    def __call__(self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
        rows = x.reshape(-1, x.shape[-1])
        bias = self.e_score_correction_bias[...] if self.spec.scoring == "sigmoid" else None
        experts, weights = route(self.router(rows.astype(jnp.float32)), bias, self.spec)
        out = swiglu_experts(
            rows, experts, weights, self.gate_proj(), self.up_proj(), self.down_proj(), valid.reshape(-1)
        ).reshape(x.shape)
        if self.spec.shared_intermediate_size:
            shared = self.shared_expert(x, valid)
            if self.spec.shared_expert_gate:
                shared = shared * jax.nn.sigmoid(self.shared_expert_gate(x).astype(jnp.float32)).astype(x.dtype)
            out = out + shared
        return out
