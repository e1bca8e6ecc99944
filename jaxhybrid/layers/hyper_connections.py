"""Manifold-constrained hyper-connections (arXiv 2409.19606; DeepSeek-V4, 2606.19348, section 2.2).

The stream is several residual streams. Weights made of all of them say what a part of a layer sees (`pre`), where its
output goes (`post`), and how the streams mix meanwhile (`mixing`). All weights are float32.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.config import HyperConnections
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.parameter import parameter

Streams = Float[Array, "B T n D"]
# The streams, post, and mixing: what a part's output is joined to.
Held = tuple[Streams, Float[Array, "B T n"], Float[Array, "B T n n"]]


class StreamWeights(nnx.Module):
    """`fn` times the streams as one vector of unit mean square."""

    def __init__(self, scheme: HyperConnections, count: int, scales: int, context: LayerContext) -> None:
        self.fn = parameter((count, scheme.streams * context.hidden_size), (None, None), jnp.float32)
        self.base = parameter((count,), (None,), jnp.float32)
        self.scale = parameter((scales,), (None,), jnp.float32)
        self.eps = context.eps

    def __call__(self, streams: Streams) -> Float[Array, "B T count"]:
        flat = streams.reshape(*streams.shape[:2], -1).astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + self.eps)
        return jnp.einsum("bti,oi->bto", flat * scale, self.fn[...])


def _gather(weights: Float[Array, "B T n"], streams: Streams) -> Float[Array, "B T D"]:
    return jnp.einsum("btn,btnd->btd", weights, streams.astype(jnp.float32)).astype(streams.dtype)


class HyperResidual(nnx.Module):
    """Around one part of a layer: x = sum_j pre_j X_j; X'_k = post_k f(x) + sum_j mixing_jk X_j."""

    def __init__(self, scheme: HyperConnections, context: LayerContext) -> None:
        self.scheme = scheme
        self.weights = StreamWeights(scheme, (2 + scheme.streams) * scheme.streams, 3, context)

    def enter(self, stream: Streams) -> tuple[Float[Array, "B T D"], Held]:
        count, eps = self.scheme.streams, self.scheme.eps
        base, scale = self.weights.base[...], self.weights.scale[...]
        sizes = jnp.repeat(scale, jnp.array([count, count, count * count]), total_repeat_length=base.size)
        pre, post, mixing = jnp.split(self.weights(stream) * sizes + base, [count, 2 * count], axis=-1)
        mixing = jax.nn.softmax(mixing.reshape(*mixing.shape[:2], count, count), axis=-1) + eps
        held = (stream, 2 * jax.nn.sigmoid(post), self._doubly_stochastic(mixing))
        return _gather(jax.nn.sigmoid(pre) + eps, stream), held

    def leave(self, held: Held, output: Float[Array, "B T D"]) -> Streams:
        streams, post, mixing = held
        mixed = jnp.einsum("btjk,btjd->btkd", mixing, streams.astype(jnp.float32))
        return (mixed + post[..., None] * output.astype(jnp.float32)[:, :, None]).astype(streams.dtype)

    def _doubly_stochastic(self, mixing: Float[Array, "B T n n"]) -> Float[Array, "B T n n"]:
        """Columns, then rows and columns in turn, divided by their sums (Sinkhorn and Knopp 1967)."""

        def divide(matrix: Float[Array, "B T n n"], axis: int) -> Float[Array, "B T n n"]:
            return matrix / (matrix.sum(axis=axis, keepdims=True) + self.scheme.eps)

        turns = self.scheme.sinkhorn_iterations - 1
        return jax.lax.fori_loop(0, turns, lambda _, matrix: divide(divide(matrix, -1), -2), divide(mixing, -2))


class HyperEnds(nnx.Module):
    """The embedding in every stream to begin with; a weighted sum of them at the end."""

    def __init__(self, scheme: HyperConnections, context: LayerContext) -> None:
        self.scheme = scheme
        self.weights = StreamWeights(scheme, scheme.streams, 1, context)

    def start(self, embedded: Float[Array, "B T D"]) -> Streams:
        rows, steps, width = embedded.shape
        return jnp.broadcast_to(embedded[:, :, None], (rows, steps, self.scheme.streams, width))

    def end(self, stream: Streams) -> Float[Array, "B T D"]:
        pre = self.weights(stream) * self.weights.scale[...] + self.weights.base[...]
        return _gather(jax.nn.sigmoid(pre) + self.scheme.eps, stream)
