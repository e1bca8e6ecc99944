"""A mixture of experts (arXiv 1701.06538): a router's choice of feed-forwards, and perhaps one that all tokens pass."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxhybrid.config import DenseSpec, MoeSpec
from jaxhybrid.layers.activation import activation
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.feed_forward import Dense
from jaxhybrid.layers.linear import Linear
from jaxhybrid.layers.norm import RmsNorm
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.layers.router import route
from jaxhybrid.layers.step import Step
from pallas_kernels.grouped_matmul import ExpertBiases, routed_experts


class ExpertMatrices(nnx.Module):
    """One matrix per expert: a stack [E, out, in], or E separate ones, of which only the chosen are ever read.

    In a scan over R layers the stack is [R, E, out, in], whole.
    """

    def __init__(
        self, count: int, shape: tuple[int, int], axes: tuple[str | None, str | None], stacked: bool, dtype: DTypeLike
    ) -> None:
        if stacked:
            self.weight = parameter((count, *shape), ("experts", *axes), dtype, whole=True)
        else:
            self.experts = nnx.List([parameter(shape, axes, dtype) for _ in range(count)])
        self.stacked = stacked

    def __call__(self) -> Float[Array, "*R E out features"] | tuple[Float[Array, "out features"], ...]:
        return self.weight[...] if self.stacked else tuple(expert[...] for expert in self.experts)


class MixtureOfExperts(nnx.Module):
    """sum_k w_k expert_k(x), plus the shared expert's output, gated if the spec says so."""

    def __init__(self, spec: MoeSpec, context: LayerContext) -> None:
        self.spec = spec
        hidden, stacked, dtype = context.hidden_size, context.execution.stack_experts, context.dtype
        inner = (spec.moe_intermediate_size, spec.latent_size or hidden)
        if spec.latent_size is not None:
            self.fc1_latent_proj = Linear(hidden, spec.latent_size, (None, None), dtype)
            self.fc2_latent_proj = Linear(spec.latent_size, hidden, (None, None), dtype)
        if spec.latent_norm:
            self.latent_norm = RmsNorm(inner[1], context.eps, dtype)
        self.router = Linear(hidden, spec.num_experts, (None, None), jnp.float32, spec.biases)
        if spec.hashed:
            table = (context.config.vocab_size, spec.num_experts_per_tok)
            self.tid2eid = parameter(table, (None, None), jnp.int32)
        if spec.corrected:
            self.e_score_correction_bias = parameter((spec.num_experts,), (None,), jnp.float32)
        if spec.activation.gated:
            self.gate_proj = ExpertMatrices(spec.num_experts, inner, ("expert_mlp", None), stacked, dtype)
        self.up_proj = ExpertMatrices(spec.num_experts, inner, ("expert_mlp", None), stacked, dtype)
        self.down_proj = ExpertMatrices(spec.num_experts, inner[::-1], (None, "expert_mlp"), stacked, dtype)
        if spec.biases and spec.activation.gated:
            self.gate_bias = parameter((spec.num_experts, inner[0]), ("experts", "expert_mlp"), dtype)
        if spec.biases:
            self.up_bias = parameter((spec.num_experts, inner[0]), ("experts", "expert_mlp"), dtype)
            self.down_bias = parameter((spec.num_experts, inner[1]), ("experts", None), dtype)
        if spec.shared_intermediate_size:
            self.shared_expert = Dense(DenseSpec(spec.shared_intermediate_size, spec.activation), context)
        if spec.shared_expert_gate:
            self.shared_expert_gate = Linear(hidden, 1, (None, None), dtype)

    def _biases(self) -> ExpertBiases | None:
        if not self.spec.biases:
            return None
        gate = self.gate_bias[...] if self.spec.activation.gated else None
        return ExpertBiases(gate, self.up_bias[...], self.down_bias[...])

    def __call__(self, x: Float[Array, "B T D"], step: Step) -> Float[Array, "B T D"]:
        rows = x.reshape(-1, x.shape[-1])
        bias = self.e_score_correction_bias[...] if self.spec.corrected else None
        fixed = self.tid2eid[...][step.tokens.reshape(-1)] if self.spec.hashed else None
        experts, weights = route(self.router(rows.astype(jnp.float32)), bias, self.spec, fixed)
        gate = self.gate_proj() if self.spec.activation.gated else None
        latent = self.spec.latent_size is not None
        out = routed_experts(
            self.fc1_latent_proj(rows) if latent else rows, experts, weights, gate, self.up_proj(), self.down_proj(),
            step.valid.reshape(-1), activation=activation(self.spec.activation), biases=self._biases(),
            layer=step.repeat if self.up_proj.stacked else None,
        )  # fmt: skip
        out = self.latent_norm(out) if self.spec.latent_norm else out
        out = (self.fc2_latent_proj(out) if latent else out).reshape(x.shape)
        if self.spec.shared_intermediate_size:
            shared = self.shared_expert(x, step)
            if self.spec.shared_expert_gate:
                shared = shared * jax.nn.sigmoid(self.shared_expert_gate(x).astype(jnp.float32)).astype(x.dtype)
            out = out + shared
        return out
