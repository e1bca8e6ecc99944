"""Mamba-2 (arXiv 2405.21060) as hybrid models use it: gate before a norm over groups of channels."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.config import Mamba2Spec
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.linear import Linear
from jaxhybrid.layers.norm import rms_norm_by_group
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.layers.step import Step
from pallas_kernels.conv_ssd import conv_ssd


class Mamba2(nnx.Module):
    """[z|xBC|dt] = W x; [x|B|C] = silu(conv(xBC)); y = ssd(x, softplus(dt + bias), B, C); W_out norm(y * silu(z))."""

    def __init__(self, spec: Mamba2Spec, context: LayerContext) -> None:
        self.spec, self.eps = spec, context.eps
        hidden, dtype = context.hidden_size, context.dtype
        inner, shared = spec.intermediate_size, 2 * spec.n_groups * spec.state_size
        self.in_proj_z = Linear(hidden, inner, ("heads", None), dtype, bias=spec.proj_bias)
        self.in_proj_x = Linear(hidden, inner, ("heads", None), dtype, bias=spec.proj_bias)
        # B and C are a group's, not a head's, and small: every device of a mesh has all of them.
        self.in_proj_bc = Linear(hidden, shared, (None, None), dtype, bias=spec.proj_bias)
        self.in_proj_dt = Linear(hidden, spec.num_heads, ("heads", None), dtype, bias=spec.proj_bias)
        self.conv_x = parameter((inner, spec.conv_kernel_size), ("heads", None), dtype)
        self.conv_bc = parameter((shared, spec.conv_kernel_size), (None, None), dtype)
        if spec.conv_bias:
            self.conv_x_bias = parameter((inner,), ("heads",), dtype)
            self.conv_bc_bias = parameter((shared,), (None,), dtype)
        self.A_log = parameter((spec.num_heads,), ("heads",), jnp.float32)
        self.D = parameter((spec.num_heads,), ("heads",), jnp.float32)
        self.dt_bias = parameter((spec.num_heads,), ("heads",), jnp.float32)
        if spec.norm:
            self.norm = parameter((spec.intermediate_size,), ("heads",), dtype)
        self.out_proj = Linear(spec.intermediate_size, hidden, (None, "heads"), dtype, bias=spec.proj_bias)

    def __call__(
        self, x: Float[Array, "B T D"], state: dict[str, Array], index: int | Array, step: Step
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        spec, (rows, steps, _), address = self.spec, x.shape, step.address
        slots = (index, address.read_slots, address.write_slots, address.lengths)
        inner, groups = spec.intermediate_size, spec.n_groups
        z, values, shared, dt = self._projected(x)
        biases = (self.conv_x_bias[...], self.conv_bc_bias[...]) if spec.conv_bias else None
        dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...]).clip(*spec.time_step_limit)
        out, (conv_x, conv_bc), recurrent = conv_ssd(
            (values, shared), (self.conv_x[...], self.conv_bc[...]), biases, (state["conv_x"], state["conv_bc"]),
            dt, -jnp.exp(self.A_log[...]), self.D[...], state["recurrent"], *slots,
        )  # fmt: skip
        out = out.reshape(rows, steps, inner) * jax.nn.silu(z.astype(jnp.float32))
        if spec.norm:
            weight = self.norm[...].reshape(groups, -1)
            out = rms_norm_by_group(out.reshape(rows, steps, groups, -1), weight, self.eps)
        changed = {"conv_x": conv_x, "conv_bc": conv_bc, "recurrent": recurrent}
        return self.out_proj(out.astype(x.dtype)), changed

    def _projected(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T _"], ...]:
        """z, x, B and C together, and dt, scaled."""
        parts = tuple(project(x) for project in (self.in_proj_z, self.in_proj_x, self.in_proj_bc, self.in_proj_dt))
        if self.spec.in_scales is None:
            return parts
        z, values, B, C, dt = self.spec.in_scales
        scales = (z, values, np.repeat((B, C), self.spec.n_groups * self.spec.state_size), dt)
        return tuple(part * np.asarray(scale, part.dtype) for part, scale in zip(parts, scales, strict=True))
