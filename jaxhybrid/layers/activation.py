"""What lies between a feed-forward's projections."""

import jax
import jax.numpy as jnp

from jaxhybrid.config import ActivationSpec
from pallas_kernels.grouped_matmul import Activation


def activation(spec: ActivationSpec) -> Activation:
    """The function that `spec` names. SwiGLU and GEGLU: arXiv 2002.05202. Squared ReLU: arXiv 2109.08668."""
    match spec.name:
        case "silu":
            return lambda gate, up: jax.nn.silu(gate) * up
        case "gelu_tanh":
            return lambda gate, up: jax.nn.gelu(gate, approximate=True) * up
        case "relu2":
            return lambda gate, up: jnp.square(jax.nn.relu(up))
