"""The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2-Exp, report, section 2.1)."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxhybrid.config import IndexerSpec, LatentAttentionSpec, LayerSpec
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.linear import Linear
from jaxhybrid.layers.norm import LayerNorm
from jaxhybrid.layers.rope import rotate
from jaxhybrid.layers.step import Step
from jaxhybrid.state.arrays import PoolArrays
from jaxhybrid.state.layout import StateLayout
from pallas_kernels.paging import write_rows
from pallas_kernels.sparse_attention import index_top_k

K_NORM_EPS = 1e-6  # whatever rms_norm_eps says


class Indexer(nnx.Module):
    """score(t, s) = sum_h w_h(t) relu(q_h(t) . k(s)) chooses the `top_k` tokens s that t attends to.

    What production adds for FP8 keys, a Hadamard rotation of queries and keys, changes no product and is left out.
    """

    def __init__(self, spec: IndexerSpec, features: int, context: LayerContext) -> None:
        """`features`: of the query latent."""
        self.spec = spec
        hidden, dtype = context.hidden_size, context.dtype
        self.wq_b = Linear(features, spec.num_heads * spec.head_dim, (None, None), dtype)
        self.wk = Linear(hidden, spec.head_dim, (None, None), dtype)
        self.k_norm = LayerNorm(spec.head_dim, K_NORM_EPS, dtype)
        self.weights_proj = Linear(hidden, spec.num_heads, (None, None), dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        q_latent: Float[Array, "B T r"],
        pages: Float[Array, "L P page dI"],
        index: int | Array,
        step: Step,
    ) -> tuple[Int[Array, "B T K"], Float[Array, "L P page dI"]]:
        """Positions that each token attends to, then -1; and the pages with the new tokens' keys."""
        spec, address = self.spec, step.address
        q = self.wq_b(q_latent).reshape(*x.shape[:2], spec.num_heads, spec.head_dim)
        q = rotate(q, step.positions, spec.rope)
        k = rotate(self.k_norm(self.wk(x))[:, :, None], step.positions, spec.rope)[:, :, 0]
        pages = write_rows(pages, k, index, address.page_table, address.starts, address.lengths)
        seen = jnp.where(step.valid, step.positions + 1, 0)
        return index_top_k(q, self.weights_proj(x), pages, index, address.page_table, seen, top_k=spec.top_k)


def no_choice(layers: Sequence[LayerSpec], layout: StateLayout, pool: PoolArrays, step: Step) -> dict[str, Array]:
    """What layers hand on to those that share an indexer: `chosen`, of nothing yet; empty if no layer shares one."""
    mixers = [layer.mixer for layer in layers]
    if not any(isinstance(mixer, LatentAttentionSpec) and mixer.indexer == "shared" for mixer in mixers):
        return {}
    group, spec = next(
        (group, mixer.indexer)
        for group, mixer in zip(layout.groups, mixers, strict=True)
        if isinstance(mixer, LatentAttentionSpec) and isinstance(mixer.indexer, IndexerSpec)
    )
    assert group is not None
    reach = step.address.page_table.shape[1] * pool[group]["index_key"].shape[2]
    return {"chosen": jnp.full((*step.tokens.shape, min(spec.top_k, reach)), -1, jnp.int32)}
