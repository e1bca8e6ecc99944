"""Kimi Delta Attention (arXiv 2510.26692, section 3): delta rule with a decay per key channel."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.config import KimiDeltaSpec
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.linear import Linear, StackedLinear
from jaxhybrid.layers.norm import RmsNorm
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.layers.step import Step
from pallas_kernels.conv_gated_delta import conv_gated_delta


class KimiDelta(nnx.Module):
    """q, k, v = silu(conv(W x)); o = delta rule; y = W_o (norm(o) * sigmoid(gate))."""

    def __init__(self, spec: KimiDeltaSpec, context: LayerContext) -> None:
        self.spec = spec
        hidden, dtype = context.hidden_size, context.dtype
        width = spec.num_heads * spec.head_dim
        self.qkv_proj = StackedLinear(3, hidden, width, "heads", dtype)
        self.qkv_conv = parameter((3, width, spec.short_conv_kernel_size), (None, "heads", None), dtype)
        self.f_a_proj = Linear(hidden, spec.head_dim, (None, None), dtype)
        self.f_b_proj = Linear(spec.head_dim, width, ("heads", None), dtype)
        if spec.full_rank_gate:
            self.g_proj = Linear(hidden, width, ("heads", None), dtype)
        else:
            self.g_a_proj = Linear(hidden, spec.head_dim, (None, None), dtype)
            self.g_b_proj = Linear(spec.head_dim, width, ("heads", None), dtype)
        self.b_proj = Linear(hidden, spec.num_heads, ("heads", None), dtype)
        self.A_log = parameter((spec.num_heads,), ("heads",), jnp.float32)
        self.dt_bias = parameter((width,), ("heads",), jnp.float32)
        self.o_norm = RmsNorm(spec.head_dim, context.eps, dtype)
        self.o_proj = Linear(width, hidden, (None, "heads"), dtype)

    def log_decay(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H d"]:
        """-exp(A_log) softplus(f), or bound sigmoid(exp(A_log) f), of f = W_fb W_fa x + dt_bias; float32, at most 0."""
        spec = self.spec
        raw = self.f_b_proj(self.f_a_proj(x)).astype(jnp.float32) + self.dt_bias[...]
        rate = jnp.repeat(jnp.exp(self.A_log[...]), spec.head_dim)
        if spec.gate_lower_bound is not None:
            decay = spec.gate_lower_bound * jax.nn.sigmoid(rate * raw)
        else:
            decay = -rate * jax.nn.softplus(raw)
        return decay.reshape(*x.shape[:2], spec.num_heads, spec.head_dim)

    def __call__(
        self, x: Float[Array, "B T D"], state: dict[str, Array], index: int | Array, step: Step
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        spec, address = self.spec, step.address
        slots = (index, address.read_slots, address.write_slots, address.lengths)
        beta = jax.nn.sigmoid(self.b_proj(x).astype(jnp.float32))
        past: tuple[Array, ...] = (state["conv_q"], state["conv_k"], state["conv_v"])
        out, past, recurrent = conv_gated_delta(
            self.qkv_proj(x), self.qkv_conv[...], past, self.log_decay(x), beta, state["recurrent"], *slots
        )
        gate = self.g_proj(x) if spec.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        gate = jax.nn.sigmoid(gate.astype(jnp.float32))
        out = (self.o_norm.by_head(out.astype(jnp.float32)) * gate).astype(x.dtype)
        changed = dict(zip(("conv_q", "conv_k", "conv_v"), past, strict=True))
        return self.o_proj(out), {**changed, "recurrent": recurrent}
