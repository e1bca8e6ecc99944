"""Dense feed-forward layers."""

from flax import nnx
from jaxtyping import Array, Float

from jaxhybrid.config import DenseSpec
from jaxhybrid.layers.activation import activation
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.linear import Linear, StackedLinear, scaled
from jaxhybrid.layers.step import Step


class Dense(nnx.Module):
    """W_down (act(W_gate x) * W_up x), or W_down act(W_up x) if the activation has no gate."""

    def __init__(self, spec: DenseSpec, context: LayerContext, features: int | None = None) -> None:
        """`features`: of input and output, where they aren't the model's hidden size."""
        width, dtype = features or context.hidden_size, context.dtype
        self.spec = spec
        if spec.activation.gated:
            self.gate_up_proj = StackedLinear(2, width, spec.intermediate_size, "mlp", dtype)
        else:
            self.up_proj = Linear(width, spec.intermediate_size, ("mlp", None), dtype)
        self.down_proj = Linear(spec.intermediate_size, width, (None, "mlp"), dtype)

    def __call__(self, x: Float[Array, "B T D"], step: Step) -> Float[Array, "B T D"]:
        act = activation(self.spec.activation)
        if self.spec.activation.gated:
            both = self.gate_up_proj(x)
            inner = act(scaled(both[..., 0, :], self.spec.gate_scale), both[..., 1, :])
        else:
            inner = act(None, self.up_proj(x))
        return scaled(self.down_proj(inner), self.spec.down_scale)
