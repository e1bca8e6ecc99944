"""Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next uses it: decay per value head, grouped value heads."""

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
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.short_conv import short_conv


class GatedDeltaNet(nnx.Module):
    """[q|k|v] = silu(conv(W x)); o = delta rule; y = W_out (norm(o) * silu(z)). The norm is a plain one."""

    def __init__(self, spec: GatedDeltaNetSpec, context: LayerContext) -> None:
        self.spec = spec
        hidden, dtype = context.hidden_size, context.dtype
        value_width = spec.num_value_heads * spec.value_head_dim
        # Rows of all queries, all keys, all values, all gates; and of all b, all a.
        self.in_proj_qkvz = Linear(hidden, spec.conv_dim + value_width, ("heads", None), dtype)
        self.in_proj_ba = Linear(hidden, 2 * spec.num_value_heads, ("heads", None), dtype)
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
        spec, (rows, steps, _), address = self.spec, x.shape, step.address
        slots = (index, address.read_slots, address.write_slots, address.lengths)
        qkvz = self.in_proj_qkvz(x)
        b, a = jnp.split(self.in_proj_ba(x).astype(jnp.float32), 2, axis=-1)
        mixed, conv = short_conv(qkvz[..., : spec.conv_dim], self.conv[...], state["conv"], *slots)
        key_width = spec.num_key_heads * spec.key_head_dim
        q = mixed[..., :key_width].reshape(rows, steps, spec.num_key_heads, spec.key_head_dim)
        k = mixed[..., key_width : 2 * key_width].reshape(q.shape)
        v = mixed[..., 2 * key_width :].reshape(rows, steps, spec.num_value_heads, spec.value_head_dim)
        beta = jax.nn.sigmoid(b)
        out, recurrent = gated_delta(q, k, v, self.log_decay(a), beta, state["recurrent"], *slots)
        gate = jax.nn.silu(qkvz[..., spec.conv_dim :].astype(jnp.float32)).reshape(out.shape)
        out = (self.norm(out) * gate).astype(x.dtype)
        return self.out_proj(out.reshape(rows, steps, -1)), {"conv": conv, "recurrent": recurrent}
