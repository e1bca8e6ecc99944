"""Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next and Qwen3.5 use it: decay per value head, grouped value heads."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.config import GatedDeltaNetSpec
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.linear import Linear
from jaxhybrid.layers.norm import RmsNorm
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.layers.step import Step
from pallas_kernels.conv_gated_delta import conv_gated_delta


class GatedDeltaNet(nnx.Module):
    """[q|k|v] = silu(conv(W x)); o = delta rule; y = W_out (norm(o) * silu(z)). The norm is a plain one."""

    def __init__(self, spec: GatedDeltaNetSpec, context: LayerContext) -> None:
        self.spec = spec
        hidden, dtype = context.hidden_size, context.dtype
        value_width = spec.num_value_heads * spec.value_head_dim
        # Rows go by key head, [q | k | v of its value heads], so that a mesh can cut between heads.
        self.in_proj_qkv = Linear(hidden, spec.conv_dim, ("heads", None), dtype)
        self.in_proj_z = Linear(hidden, value_width, ("heads", None), dtype)
        self.in_proj_b = Linear(hidden, spec.num_value_heads, ("heads", None), dtype)
        self.in_proj_a = Linear(hidden, spec.num_value_heads, ("heads", None), dtype)
        self.conv = parameter((spec.conv_dim, spec.conv_kernel_size), ("heads", None), dtype)
        self.A_log = parameter((spec.num_value_heads,), ("heads",), jnp.float32)
        self.dt_bias = parameter((spec.num_value_heads,), ("heads",), jnp.float32)
        self.norm = RmsNorm(spec.value_head_dim, context.eps, dtype)
        self.out_proj = Linear(value_width, hidden, (None, "heads"), dtype)

    def log_decay(self, a: Float[Array, "B T Hv"]) -> Float[Array, "B T Hv"]:
        """-exp(A_log) softplus(a + dt_bias), at most 0."""
        return -jnp.exp(self.A_log[...]) * jax.nn.softplus(a + self.dt_bias[...])

    def __call__(
        self, x: Float[Array, "B T D"], state: dict[str, Array], index: int | Array, step: Step
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        address = step.address
        slots = (index, address.read_slots, address.write_slots, address.lengths)
        beta = jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32))
        decay = self.log_decay(self.in_proj_a(x).astype(jnp.float32))
        out, (conv,), recurrent = conv_gated_delta(
            self.in_proj_qkv(x), self.conv[...], (state["conv"],), decay, beta, state["recurrent"], *slots
        )
        gate = jax.nn.silu(self.in_proj_z(x).astype(jnp.float32))
        out = (self.norm.by_head(out.astype(jnp.float32)) * gate).astype(x.dtype)
        return self.out_proj(out), {"conv": conv, "recurrent": recurrent}
