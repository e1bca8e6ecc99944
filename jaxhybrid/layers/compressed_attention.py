"""DeepSeek-V4's compressed attention (arXiv 2606.19348, section 2.3): a window, and entries for all before it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxhybrid.config import CompressedAttentionSpec, IndexerSpec, RopeSpec
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.linear import Linear
from jaxhybrid.layers.norm import RmsNorm
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.layers.rope import rotate
from jaxhybrid.layers.step import Step
from pallas_kernels.compressed_attention import compressed_attention, pool_windows
from pallas_kernels.paging import write_rows
from pallas_kernels.sparse_attention import index_top_k


def turn(x: Float[Array, "B T H d"], positions: Int[Array, "B T"], rope: RopeSpec) -> Float[Array, "B T H d"]:
    """Rotates the last channels."""
    kept = x.shape[-1] - rope.rotary_dim
    return jnp.concatenate([x[..., :kept], rotate(x[..., kept:], positions, rope)], axis=-1)


class Compressor(nnx.Module):
    """Pools every `stride` tokens into one entry: values weighted by a softmax of gates, normalised and rotated.

    With `overlap` there are two series of values and gates: the first goes into the next window's entry.
    """

    def __init__(self, width: int, stride: int, overlap: bool, rope: RopeSpec, context: LayerContext) -> None:
        self.width, self.stride, self.series, self.rope = width, stride, 1 + overlap, rope
        out, dtype = self.series * width, context.dtype
        self.wkv = Linear(context.hidden_size, out, (None, None), dtype)
        self.wgate = Linear(context.hidden_size, out, (None, None), dtype)
        self.ape = parameter((stride, out), (None, None), jnp.float32)
        self.norm = RmsNorm(width, context.eps, dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        entries: Float[Array, "L P page d"],
        pooling: Float[Array, "L N R 3 d"],
        index: int | Array,
        step: Step,
    ) -> tuple[Float[Array, "L P page d"], Float[Array, "L N R 3 d"]]:
        """The pages with what the new tokens completed, and the sums of what they did not."""
        address, series = step.address, (self.series, self.width)
        values, gates = (project(x).reshape(*x.shape[:2], *series) for project in (self.wkv, self.wgate))
        made, count, pooling = pool_windows(
            values, gates, self.ape[...].reshape(self.stride, *series), pooling, index,
            address.read_slots, address.write_slots, address.starts, address.lengths,
        )  # fmt: skip
        first = address.starts // self.stride
        positions = (first[:, None] + jnp.arange(made.shape[1])) * self.stride
        made = turn(self.norm(made.astype(x.dtype))[:, :, None], positions, self.rope)[:, :, 0]
        return write_rows(entries, made, index, address.page_table, first, count), pooling


class EntryIndexer(nnx.Module):
    """The lightning indexer over entries of its own: each token attends to the best of those it may see."""

    def __init__(self, spec: IndexerSpec, features: int, stride: int, overlap: bool, context: LayerContext) -> None:
        """`features`: of the query latent."""
        self.spec = spec
        self.compressor = Compressor(spec.head_dim, stride, overlap, spec.rope, context)
        self.wq_b = Linear(features, spec.num_heads * spec.head_dim, (None, None), context.dtype)
        self.weights_proj = Linear(context.hidden_size, spec.num_heads, (None, None), context.dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        q_latent: Float[Array, "B T r"],
        seen: Int[Array, "B T"],
        state: dict[str, Array],
        index: int | Array,
        step: Step,
    ) -> tuple[Int[Array, "B T K"], dict[str, Array]]:
        """Entries that each token attends to, then -1, of the first `seen`; and the changed state."""
        keys, pooling = self.compressor(x, state["index_entries"], state["index_pooling"], index, step)
        q = self.wq_b(q_latent).reshape(*x.shape[:2], self.spec.num_heads, self.spec.head_dim)
        q, weights, table = turn(q, step.positions, self.spec.rope), self.weights_proj(x), step.address.page_table
        chosen, keys = index_top_k(q, weights, keys, index, table, seen, top_k=self.spec.top_k)
        return chosen, {"index_entries": keys, "index_pooling": pooling}


class CompressedAttention(nnx.Module):
    """One softmax over a window, entries and a sink; keys are values, so the output is turned back by its position."""

    def __init__(self, spec: CompressedAttentionSpec, context: LayerContext) -> None:
        self.spec, self.eps = spec, context.eps
        hidden, dtype, width = context.hidden_size, context.dtype, spec.num_attention_heads * spec.head_dim
        self.q_a_proj = Linear(hidden, spec.q_lora_rank, (None, None), dtype)
        self.q_a_norm = RmsNorm(spec.q_lora_rank, context.eps, dtype)
        self.q_b_proj = Linear(spec.q_lora_rank, width, ("heads", None), dtype)
        self.kv_proj = Linear(hidden, spec.head_dim, (None, None), dtype)
        self.kv_norm = RmsNorm(spec.head_dim, context.eps, dtype)
        self.sinks = parameter((spec.num_attention_heads,), ("heads",), jnp.float32)
        self.o_a_proj = parameter(
            (spec.o_groups, spec.o_lora_rank, width // spec.o_groups), ("heads", None, None), dtype
        )
        self.o_b_proj = Linear(spec.o_groups * spec.o_lora_rank, hidden, (None, "heads"), dtype)
        if spec.stride is not None:
            self.compressor = Compressor(spec.head_dim, spec.stride, spec.overlap, spec.rope, context)
            if spec.indexer is not None:
                self.indexer = EntryIndexer(spec.indexer, spec.q_lora_rank, spec.stride, spec.overlap, context)

    def __call__(
        self, x: Float[Array, "B T D"], state: dict[str, Array], index: int | Array, step: Step
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        spec, (rows, steps, _), address = self.spec, x.shape, step.address
        q_latent = self.q_a_norm(self.q_a_proj(x))
        q = self._unit(self.q_b_proj(q_latent).reshape(rows, steps, spec.num_attention_heads, spec.head_dim))
        q = turn(q, step.positions, spec.rope)
        kv = turn(self.kv_norm(self.kv_proj(x))[:, :, None], step.positions, spec.rope)[:, :, 0]
        entries, chosen, changed = self._entries(x, q_latent, state, index, step)
        out, changed["window"], entries = compressed_attention(
            q, kv, self.sinks[...], state["window"], entries, chosen, index, address.page_table,
            address.starts, address.lengths, address.read_slots, address.write_slots, scale=spec.head_dim**-0.5,
        )  # fmt: skip
        if entries is not None:
            changed["entries"] = entries
        out = turn(out, -step.positions, spec.rope).reshape(rows, steps, spec.o_groups, -1)
        low_rank = jnp.einsum("btgi,goi->btgo", out, self.o_a_proj[...]).astype(x.dtype)
        return self.o_b_proj(low_rank.reshape(rows, steps, -1)), changed

    def _unit(self, q: Float[Array, "B T H d"]) -> Float[Array, "B T H d"]:
        """Each head divided by its root mean square."""
        wide = q.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)).astype(q.dtype)

    def _entries(
        self, x: Float[Array, "B T D"], q_latent: Float[Array, "B T r"], state: dict[str, Array], index: int | Array,
        step: Step,
    ) -> tuple[Float[Array, "L P page d"] | None, Int[Array, "B T K"] | None, dict[str, Array]]:  # fmt: skip
        """Pages of entries, which of them each token attends to, and the changed state beside them."""
        if self.spec.stride is None:
            return None, None, {}
        entries, pooling = self.compressor(x, state["entries"], state["pooling"], index, step)
        # A window's entry is seen from its last token on.
        seen = jnp.where(step.valid, (step.positions + 1) // self.spec.stride, 0)
        if self.spec.indexer is None:
            every = jnp.arange(step.address.page_table.shape[1] * entries.shape[2], dtype=jnp.int32)
            return entries, jnp.where(every < seen[..., None], every, -1), {"pooling": pooling}
        chosen, changed = self.indexer(x, q_latent, seen, state, index, step)
        return entries, chosen, {"pooling": pooling, **changed}
