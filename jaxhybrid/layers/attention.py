"""Grouped-query attention over paged keys and values (arXiv 2305.13245)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.config import AttentionSpec
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.linear import Linear
from jaxhybrid.layers.norm import RmsNorm
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.layers.rope import rotate
from jaxhybrid.layers.step import Step
from pallas_kernels.paged_attention import paged_attention


class Attention(nnx.Module):
    """o = W_o attend(q, k, v), with norms on q and k, rotary positions, a window, sinks or an output gate if asked."""

    def __init__(self, spec: AttentionSpec, context: LayerContext) -> None:
        self.spec = spec
        hidden, dtype = context.hidden_size, context.dtype
        width, kv_width = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        # With an output gate each head has the rows of its query and then those of its gate.
        query_width = 2 * width if spec.output_gate else width
        kv_axis = "kv_heads" if spec.kv_copies == 1 else None
        self.q_proj = Linear(hidden, query_width, ("heads", None), dtype, spec.qkv_bias)
        self.k_proj = Linear(hidden, kv_width, (kv_axis, None), dtype, spec.qkv_bias)
        self.v_proj = Linear(hidden, kv_width, (kv_axis, None), dtype, spec.qkv_bias)
        self.o_proj = Linear(width, hidden, (None, "heads"), dtype, spec.o_bias)
        if spec.sinks:
            self.sinks = parameter((spec.num_attention_heads,), ("heads",), jnp.float32)
        if spec.qk_norm:
            self.q_norm = RmsNorm(spec.head_dim, context.eps, dtype, context.zero_centred)
            self.k_norm = RmsNorm(spec.head_dim, context.eps, dtype, context.zero_centred)

    def __call__(
        self, x: Float[Array, "B T D"], state: dict[str, Array], index: int | Array, step: Step
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        spec, (rows, steps, _), address = self.spec, x.shape, step.address
        queries = self.q_proj(x).reshape(rows, steps, spec.num_attention_heads, -1)
        q = queries[..., : spec.head_dim]
        k = self.k_proj(x).reshape(rows, steps, spec.num_key_value_heads, spec.head_dim)
        v = self.v_proj(x).reshape(rows, steps, spec.num_key_value_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.rope is not None:
            q, k = rotate(q, step.rope_positions, spec.rope), rotate(k, step.rope_positions, spec.rope)
        if spec.kv_copies > 1:
            k, v = (jnp.repeat(each, spec.kv_copies, axis=2) for each in (k, v))
        out, keys, values = paged_attention(
            q, k, v, state["k"], state["v"], index, address.page_table, address.starts, address.lengths,
            scale=spec.head_dim**-0.5 if spec.scale is None else spec.scale,
            window=spec.sliding_window,
            sinks=self.sinks[...] if spec.sinks else None,
            soft_cap=spec.logit_softcap,
        )  # fmt: skip
        out = out.astype(x.dtype)
        if spec.output_gate:
            out = out * jax.nn.sigmoid(queries[..., spec.head_dim :].astype(jnp.float32)).astype(x.dtype)
        return self.o_proj(out.reshape(rows, steps, -1)), {"k": keys, "v": values}
