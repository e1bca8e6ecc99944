"""Multi-head latent attention over paged latents (DeepSeek-V2, arXiv 2405.04434, section 2.1), dense or sparse."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.config import IndexerSpec, LatentAttentionSpec
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.indexer import Indexer
from jaxhybrid.layers.linear import Linear
from jaxhybrid.layers.norm import RmsNorm
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.layers.rope import rotate
from jaxhybrid.layers.step import Step
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.sparse_attention import sparse_latent_attention

INNER_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says


class LatentAttention(nnx.Module):
    """Keys and values of every head are linear in one cached latent; `output_gate` is Kimi K3's sigmoid gate.

    With an indexer of its own, a layer leaves its choice of tokens in the state as `chosen` if it finds one there, and
    a layer that shares one takes it from there.
    """

    def __init__(self, spec: LatentAttentionSpec, context: LayerContext) -> None:
        self.spec = spec
        hidden, dtype = context.hidden_size, context.dtype
        heads, query_dim = spec.num_attention_heads, spec.qk_nope_head_dim + spec.qk_rope_head_dim
        if spec.q_lora_rank is None:
            self.q_proj = Linear(hidden, heads * query_dim, ("heads", None), dtype)
        else:
            self.q_a_proj = Linear(hidden, spec.q_lora_rank, (None, None), dtype)
            self.q_a_layernorm = RmsNorm(spec.q_lora_rank, INNER_NORM_EPS, dtype)
            self.q_b_proj = Linear(spec.q_lora_rank, heads * query_dim, ("heads", None), dtype)
        self.kv_a_proj = Linear(hidden, spec.kv_lora_rank + spec.qk_rope_head_dim, (None, None), dtype)
        self.kv_a_layernorm = RmsNorm(spec.kv_lora_rank, INNER_NORM_EPS, dtype)
        self.k_up = parameter((heads, spec.qk_nope_head_dim, spec.kv_lora_rank), ("heads", None, None), dtype)
        self.v_up = parameter((heads, spec.v_head_dim, spec.kv_lora_rank), ("heads", None, None), dtype)
        self.o_proj = Linear(heads * spec.v_head_dim, hidden, (None, "heads"), dtype)
        if spec.output_gate:
            self.gate_proj = Linear(hidden, heads * spec.v_head_dim, ("heads", None), dtype)
        if isinstance(spec.indexer, IndexerSpec):
            assert spec.q_lora_rank is not None
            self.indexer = Indexer(spec.indexer, spec.q_lora_rank, context)

    def __call__(
        self, x: Float[Array, "B T D"], state: dict[str, Array], index: int | Array, step: Step
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        spec, (rows, steps, _), address = self.spec, x.shape, step.address
        query_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim
        q_latent = x if spec.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_proj(x) if spec.q_lora_rank is None else self.q_b_proj(q_latent)
        q = q.reshape(rows, steps, spec.num_attention_heads, query_dim)
        compressed = self.kv_a_proj(x)
        latent = self.kv_a_layernorm(compressed[..., : spec.kv_lora_rank])
        q_rope, k_rope = q[..., spec.qk_nope_head_dim :], compressed[..., spec.kv_lora_rank :]
        if spec.rope is not None:
            q_rope = rotate(q_rope, step.positions, spec.rope)
            k_rope = rotate(k_rope[:, :, None], step.positions, spec.rope)[:, :, 0]
        new = (q[..., : spec.qk_nope_head_dim], q_rope, latent, k_rope, self.k_up[...], self.v_up[...], state["latent"])
        place = (index, address.page_table, address.starts, address.lengths)
        scale = query_dim**-0.5 * spec.scale_factor
        changed = {}
        if spec.indexer is None:
            out, changed["latent"] = latent_attention(*new, *place, scale=scale)
        else:
            if isinstance(spec.indexer, IndexerSpec):
                chosen, changed["index_key"] = self.indexer(x, q_latent, state["index_key"], index, step)
            else:
                chosen = state["chosen"]
            if "chosen" in state:
                changed["chosen"] = chosen
            out, changed["latent"] = sparse_latent_attention(*new, chosen, *place, scale=scale)
        out = out.astype(x.dtype).reshape(rows, steps, -1)
        if spec.output_gate:
            out = out * jax.nn.sigmoid(self.gate_proj(x).astype(jnp.float32)).astype(x.dtype)
        return self.o_proj(out), changed
