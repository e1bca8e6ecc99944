"""Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next uses it: decay per value head, grouped value heads."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxhybrid.config import GatedDeltaNetSpec
from jaxhybrid.layers.linear import Linear
from jaxhybrid.layers.norm import RmsNorm
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.state.batch import BatchAddress
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.short_conv import short_conv


class GatedDeltaNet(nnx.Module):
    """[q|k|v] = silu(conv(W x)); o = delta rule; y = W_out (norm(o) * silu(z)). The norm is a plain one."""

    def __init__(self, spec: GatedDeltaNetSpec, hidden: int, eps: float, dtype: DTypeLike) -> None:
        self.spec = spec
        value_width = spec.num_value_heads * spec.value_head_dim
        self.in_proj_qkv = Linear(hidden, spec.conv_dim, ("heads", None), dtype)
        self.in_proj_z = Linear(hidden, value_width, ("heads", None), dtype)
        self.in_proj_b = Linear(hidden, spec.num_value_heads, ("heads", None), dtype)
        self.in_proj_a = Linear(hidden, spec.num_value_heads, ("heads", None), dtype)
        self.conv = parameter((spec.conv_dim, spec.conv_kernel_size), ("heads", None), dtype)
        self.A_log = parameter((spec.num_value_heads,), ("heads",), jnp.float32)
        self.dt_bias = parameter((spec.num_value_heads,), ("heads",), jnp.float32)
        self.norm = RmsNorm(spec.value_head_dim, eps, dtype)
        self.out_proj = Linear(value_width, hidden, (None, "heads"), dtype)

    def log_decay(self, x: Float[Array, "B T D"]) -> Float[Array, "B T Hv"]:
        """-exp(A_log) softplus(a + dt_bias), float32, at most 0."""
        step = jax.nn.softplus(self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...])
        return -jnp.exp(self.A_log[...]) * step

    def __call__(
        self, x: Float[Array, "B T D"], state: dict[str, Array], index: int | Array, address: BatchAddress
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        spec, (rows, steps, _) = self.spec, x.shape
        slots = (index, address.read_slots, address.write_slots, address.lengths)
        mixed, conv = short_conv(self.in_proj_qkv(x), self.conv[...], state["conv"], *slots)
        key_width = spec.num_key_heads * spec.key_head_dim
        q = mixed[..., :key_width].reshape(rows, steps, spec.num_key_heads, spec.key_head_dim)
        k = mixed[..., key_width : 2 * key_width].reshape(q.shape)
        v = mixed[..., 2 * key_width :].reshape(rows, steps, spec.num_value_heads, spec.value_head_dim)
        beta = jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32))
        out, recurrent = gated_delta(q, k, v, self.log_decay(x), beta, state["recurrent"], *slots)
        gate = jax.nn.silu(self.in_proj_z(x).astype(jnp.float32)).reshape(out.shape)
        out = (self.norm(out) * gate).astype(x.dtype)
        return self.out_proj(out.reshape(rows, steps, -1)), {"conv": conv, "recurrent": recurrent}
