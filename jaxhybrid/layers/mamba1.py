"""Mamba-1 (arXiv 2312.00752) with Jamba's norms on the step size, B and C (arXiv 2403.19887)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.config import Mamba1Spec
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.linear import Linear, StackedLinear
from jaxhybrid.layers.norm import RmsNorm
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.layers.step import Step
from pallas_kernels.selective_scan import selective_scan
from pallas_kernels.short_conv import short_conv


class Mamba1(nnx.Module):
    """[x|z] = W u; x = silu(conv(x)); [dt|B|C] = norms(W_x x); o = scan(x, softplus(W_dt dt + bias), B, C) * silu(z).

    The result is W_out o.
    """

    def __init__(self, spec: Mamba1Spec, context: LayerContext) -> None:
        self.spec = spec
        hidden, dtype, inner = context.hidden_size, context.dtype, spec.intermediate_size
        self.in_proj = StackedLinear(2, hidden, inner, "heads", dtype, bias=spec.proj_bias)
        self.conv = parameter((inner, spec.conv_kernel_size), ("heads", None), dtype)
        if spec.conv_bias:
            self.conv_bias = parameter((inner,), ("heads",), dtype)
        self.x_proj = Linear(inner, spec.dt_rank + 2 * spec.state_size, (None, "heads"), dtype)
        self.dt_layernorm = RmsNorm(spec.dt_rank, context.eps, dtype)
        self.b_layernorm = RmsNorm(spec.state_size, context.eps, dtype)
        self.c_layernorm = RmsNorm(spec.state_size, context.eps, dtype)
        self.dt_proj = Linear(spec.dt_rank, inner, ("heads", None), dtype)
        self.dt_bias = parameter((inner,), ("heads",), jnp.float32)
        self.A_log = parameter((spec.state_size, inner), (None, "heads"), jnp.float32)
        self.D = parameter((inner,), ("heads",), jnp.float32)
        self.out_proj = Linear(inner, hidden, (None, "heads"), dtype, bias=spec.proj_bias)

    def __call__(
        self, x: Float[Array, "B T D"], state: dict[str, Array], index: int | Array, step: Step
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        spec, address = self.spec, step.address
        slots = (index, address.read_slots, address.write_slots, address.lengths)
        values, z = jnp.moveaxis(self.in_proj(x), 2, 0)
        bias = self.conv_bias[...] if spec.conv_bias else None
        values, conv = short_conv(values, self.conv[...], state["conv"], *slots, bias)
        parts = jnp.split(self.x_proj(values), (spec.dt_rank, spec.dt_rank + spec.state_size), axis=-1)
        dt, B, C = self.dt_layernorm(parts[0]), self.b_layernorm(parts[1]), self.c_layernorm(parts[2])
        dt = jax.nn.softplus(self.dt_proj(dt).astype(jnp.float32) + self.dt_bias[...])
        out, recurrent = selective_scan(
            values, dt, -jnp.exp(self.A_log[...]), B, C, self.D[...], state["recurrent"], *slots
        )
        out = (out * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
        return self.out_proj(out), {"conv": conv, "recurrent": recurrent}
