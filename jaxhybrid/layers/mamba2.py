"""Mamba-2 (arXiv 2405.21060) as hybrid models use it: gate before a norm over groups of channels."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.config import Mamba2Spec
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.linear import Linear
from jaxhybrid.layers.norm import rms_norm
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.layers.step import Step
from pallas_kernels.short_conv import short_conv
from pallas_kernels.ssd import ssd


class Mamba2(nnx.Module):
    """[z|xBC|dt] = W x; [x|B|C] = silu(conv(xBC)); y = ssd(x, softplus(dt + bias), B, C); W_out norm(y * silu(z))."""

    def __init__(self, spec: Mamba2Spec, context: LayerContext) -> None:
        self.spec, self.eps = spec, context.eps
        hidden, dtype = context.hidden_size, context.dtype
        rows = spec.intermediate_size + spec.conv_dim + spec.num_heads
        self.in_proj = Linear(hidden, rows, ("heads", None), dtype, bias=spec.proj_bias)
        self.conv = parameter((spec.conv_dim, spec.conv_kernel_size), ("heads", None), dtype)
        if spec.conv_bias:
            self.conv_bias = parameter((spec.conv_dim,), ("heads",), dtype)
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
        projected = self.in_proj(x)
        if spec.in_scales is not None:
            sizes = (inner, inner, groups * spec.state_size, groups * spec.state_size, spec.num_heads)
            projected = projected * np.repeat(spec.in_scales, sizes).astype(projected.dtype)
        z, mixed, dt = jnp.split(projected, (inner, inner + spec.conv_dim), axis=-1)
        bias = self.conv_bias[...] if spec.conv_bias else None
        mixed, conv = short_conv(mixed, self.conv[...], state["conv"], *slots, bias)
        values, B, C = jnp.split(mixed, (inner, inner + groups * spec.state_size), axis=-1)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...]).clip(*spec.time_step_limit)
        out, recurrent = ssd(
            values.reshape(rows, steps, spec.num_heads, spec.head_dim), dt, -jnp.exp(self.A_log[...]),
            B.reshape(rows, steps, groups, spec.state_size), C.reshape(rows, steps, groups, spec.state_size),
            self.D[...], state["recurrent"], *slots,
        )  # fmt: skip
        out = out.reshape(rows, steps, inner) * jax.nn.silu(z.astype(jnp.float32))
        if spec.norm:
            weight = self.norm[...].reshape(groups, -1)
            out = rms_norm(out.reshape(rows, steps, groups, -1), weight, self.eps).reshape(out.shape)
        return self.out_proj(out.astype(x.dtype)), {"conv": conv, "recurrent": recurrent}
