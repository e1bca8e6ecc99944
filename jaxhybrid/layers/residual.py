"""How a layer's parts are joined to what flows past them.

Between layers flows a *stream*: the hidden state, or whatever a residual scheme makes of it (any pytree of arrays
whose structure no layer changes). Around each part of a layer a residual module says what the part sees
(`enter`: stream to input and what to hold) and where its output goes (`leave`: held and output to stream).
"""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.config import AttentionResidual, HyperConnections, LayerSpec
from jaxhybrid.layers.attention_residual import BlockEnds, BlockResidual
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.hyper_connections import HyperEnds, HyperResidual
from jaxhybrid.layers.linear import scaled


class PlainResidual(nnx.Module):
    """x + scale f(x)."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def enter(self, stream: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        return stream, stream

    def leave(self, held: Float[Array, "B T D"], output: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return held + scaled(output, self.scale)


class PlainEnds(nnx.Module):
    """The stream is the hidden state itself."""

    def start(self, embedded: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return embedded

    def end(self, stream: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return stream


def residual(spec: LayerSpec, context: LayerContext, first: bool) -> Any:
    """The residual module around one part of a layer, the `first` of its parts or the second."""
    scheme = context.config.residual
    if isinstance(scheme, AttentionResidual):
        return BlockResidual(context, seals=spec.seals_block and first)
    if isinstance(scheme, HyperConnections):
        return HyperResidual(scheme, context)
    return PlainResidual(scheme.scale)


def ends(context: LayerContext) -> Any:
    """The module that makes the first stream of embeddings, and the hidden state of the last stream."""
    scheme = context.config.residual
    if isinstance(scheme, HyperConnections):
        return HyperEnds(scheme, context)
    return BlockEnds(context) if isinstance(scheme, AttentionResidual) else PlainEnds()
