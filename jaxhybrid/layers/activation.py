"""What lies between a feed-forward's projections."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxhybrid.config import ActivationSpec
from pallas_kernels.grouped_matmul import Activation


def activation(spec: ActivationSpec) -> Activation:
    """The function that `spec` names and clamps. SwiGLU and GEGLU: arXiv 2002.05202. Squared ReLU: arXiv 2109.08668."""
    act = _unclamped(spec)
    if (limit := spec.limit) is None:
        return act
    return lambda gate, up: act(jnp.minimum(gate, limit), jnp.clip(up, -limit, limit))


def _unclamped(spec: ActivationSpec) -> Activation:
    match spec.name:
        case "silu":
            return lambda gate, up: jax.nn.silu(gate) * up
        case "gelu_tanh":
            return lambda gate, up: jax.nn.gelu(gate, approximate=True) * up
        case "situ":
            return lambda gate, up: _situ(gate, up, spec.beta, spec.linear_beta)
        case "gpt_oss":
            return lambda gate, up: gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
        case "relu2":
            return lambda gate, up: jnp.square(jax.nn.relu(up))


def _situ(
    gate: Float[Array, "*batch features"], up: Float[Array, "*batch features"], beta: float, linear_beta: float | None
) -> Float[Array, "*batch features"]:
    """Kimi K3's (arXiv 2607.24653), in float32."""
    wide, rest = gate.astype(jnp.float32), up.astype(jnp.float32)
    if linear_beta is not None:
        rest = linear_beta * jnp.tanh(rest / linear_beta)
    return (beta * jnp.tanh(wide / beta) * jax.nn.sigmoid(wide) * rest).astype(gate.dtype)
