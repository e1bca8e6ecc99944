"""Attention and Mamba-2 side by side, as in every layer of Falcon-H1 (arXiv 2507.22448)."""

from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.config import AttentionMamba2Spec
from jaxhybrid.layers.attention import Attention
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.linear import scaled
from jaxhybrid.layers.mamba2 import Mamba2
from jaxhybrid.layers.step import Step


class AttentionMamba2(nnx.Module):
    """y = a attention(x) + m mamba(x). Their state arrays have different names, so one group holds both."""

    def __init__(self, spec: AttentionMamba2Spec, context: LayerContext) -> None:
        self.spec = spec
        self.attention = Attention(spec.attention, context)
        self.mamba = Mamba2(spec.mamba, context)

    def __call__(
        self, x: Float[Array, "B T D"], state: dict[str, Array], index: int | Array, step: Step
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        attended, pages = self.attention(x, state, index, step)
        scanned, slots = self.mamba(x, state, index, step)
        y = scaled(attended, self.spec.attention_scale) + scaled(scanned, self.spec.mamba_scale)
        return y, {**pages, **slots}
