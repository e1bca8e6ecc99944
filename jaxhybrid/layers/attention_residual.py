"""Attention residuals over blocks of layers (arXiv 2603.15031), as Kimi K3 uses them.

The stream is (blocks, sealed, sum): the sums of finished blocks, how many there are, and the running sum. Each part of
a layer sees a mixture of all of them, chosen per token; what it returns is added to the running sum.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.linear import Linear
from jaxhybrid.layers.norm import RmsNorm

# Room for every block from the first layer on, and the count as an array: a scan over layers needs a stream whose
# shapes stay the same. Blocks that are not sealed yet are masked out; reading their zeros costs little beside a layer.
Blocks = tuple[Float[Array, "S B T D"], Int[Array, ""], Float[Array, "B T D"]]


class BlockMixture(nnx.Module):
    """sum_j softmax_j(w . rms_norm(V_j)) V_j over the sealed blocks and the running sum V, scored in float32."""

    def __init__(self, context: LayerContext) -> None:
        self.norm = RmsNorm(context.hidden_size, context.eps, context.dtype)
        self.proj = Linear(context.hidden_size, 1, (None, None), context.dtype)

    def __call__(self, stream: Blocks) -> Float[Array, "B T D"]:
        blocks, sealed, running = stream
        candidates = jnp.concatenate([blocks, running[None]]).astype(jnp.float32)
        weight = self.norm.weight[...].astype(jnp.float32) * self.proj.weight[0].astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(candidates * candidates, axis=-1) + self.norm.eps)
        scores = jnp.einsum("sbtd,d->sbt", candidates, weight) * scale
        number = jnp.arange(candidates.shape[0])[:, None, None]
        scores = jnp.where((number < sealed) | (number == blocks.shape[0]), scores, -jnp.inf)
        mixed = jnp.einsum("sbt,sbtd->btd", jax.nn.softmax(scores, axis=0), candidates)
        return mixed.astype(running.dtype)


class BlockResidual(nnx.Module):
    """Around one part of a layer; where it `seals`, the running sum becomes a block after the part has seen it."""

    def __init__(self, context: LayerContext, seals: bool) -> None:
        self.mixture = BlockMixture(context)
        self.seals = seals

    def enter(self, stream: Blocks) -> tuple[Float[Array, "B T D"], Blocks]:
        x = self.mixture(stream)
        if not self.seals:
            return x, stream
        blocks, sealed, running = stream
        return x, (blocks.at[sealed].set(running), sealed + 1, jnp.zeros_like(running))

    def leave(self, held: Blocks, output: Float[Array, "B T D"]) -> Blocks:
        blocks, sealed, running = held
        return blocks, sealed, running + output


class BlockEnds(nnx.Module):
    """No block and the embeddings to begin with; a last mixture."""

    def __init__(self, context: LayerContext) -> None:
        self.mixture = BlockMixture(context)
        self.room = sum(layer.seals_block for layer in context.config.layers)

    def start(self, embedded: Float[Array, "B T D"]) -> Blocks:
        return jnp.zeros((self.room, *embedded.shape), embedded.dtype), jnp.int32(0), embedded

    def end(self, stream: Blocks) -> Float[Array, "B T D"]:
        return self.mixture(stream)
