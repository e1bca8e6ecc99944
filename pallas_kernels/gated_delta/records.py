"""What one token of the gated delta rule adds to a state, small enough to keep."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaRecords:
    """Update records of tokens: with them, S <- exp(log_decay) S + k u^T, per value head and without the tokens.

    u = beta (v - (exp(log_decay) S)^T k) already holds what the state answered, so records can be applied to the state
    that they were made from, in order, and to no other. A null record (all zeros) changes nothing.

    All float32: k and u enter the state as products, and in bfloat16 would cost it 2^-9 of every update; a rounded
    log_decay is wrong by more the longer the state lives.

    Attributes:
        k: normalised keys.
        u: what each key is to answer besides.
        log_decay: natural logarithm of the decay, per head or per key channel.
    """

    k: Float[Array, "*tokens Hk dk"]
    u: Float[Array, "*tokens Hv dv"]
    log_decay: Float[Array, "*tokens Hv"] | Float[Array, "*tokens Hv dk"]

    def leaves(self) -> tuple[Array, Array, Array]:
        """k, u and log_decay."""
        return self.k, self.u, self.log_decay


def make_ring(
    layers: int, slots: int, size: int, key_heads: int, key_dim: int, value_heads: int, value_dim: int, *,
    per_channel: bool,
) -> DeltaRecords:  # fmt: skip
    """An empty ring: leaves [layers, slots, size, ...] with room for `size` records in each slot of each layer."""
    decay_dims = (key_dim,) if per_channel else ()
    shapes = (key_heads, key_dim), (value_heads, value_dim), (value_heads, *decay_dims)
    return DeltaRecords(*(jnp.zeros((layers, slots, size, *shape), jnp.float32) for shape in shapes))
