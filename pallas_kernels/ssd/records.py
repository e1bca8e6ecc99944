"""What one token of Mamba-2 adds to a state, small enough to keep."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.padding import masked


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SsdRecords:
    """Update records of tokens: with them, h <- exp(log_decay) h + (dt x) B^T, per head and without the tokens.

    Unlike the delta rule's they do not depend on the state. A null record (all zeros) changes nothing. All float32, as
    the products that they are made of.

    Attributes:
        B: what is written along the state's dimension, of each group of heads.
        dt_x: step size times input, the heads' channels side by side (on a TPU, rows of 64 would be half padding).
        log_decay: dt A, the natural logarithm of the decay.
    """

    B: Float[Array, "*tokens G N"]
    dt_x: Float[Array, "*tokens H*P"]
    log_decay: Float[Array, "*tokens H"]

    def leaves(self) -> tuple[Array, Array, Array]:
        """B, dt_x and log_decay."""
        return self.B, self.dt_x, self.log_decay


def make_ring(
    layers: int, slots: int, size: int, heads: int, head_dim: int, groups: int, state_size: int
) -> SsdRecords:
    """An empty ring: leaves [layers, slots, size, ...] with room for `size` records in each slot of each layer."""
    shapes = (groups, state_size), (heads * head_dim,), (heads,)
    return SsdRecords(*(jnp.zeros((layers, slots, size, *shape), jnp.float32) for shape in shapes))


def records_of(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G N"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T G N"], Float[Array, "B T H*P"], Float[Array, "B T H"]]:
    """B, dt_x and log_decay of tokens; null on padding."""
    x, dt, B = masked(lengths, x, dt, B)
    return B, (dt[..., None] * x).reshape(*x.shape[:2], -1), dt * A.astype(jnp.float32)
