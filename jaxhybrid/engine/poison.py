"""Fills freed state with NaN, so that reading it can't go unseen."""

import jax.numpy as jnp

from jaxhybrid.state.arrays import PoolArrays


def poison_freed(pool: PoolArrays, slots: list[int], pages: list[int]) -> PoolArrays:
    """NaN in every leaf at these slots and pages (leaf names tell which it is indexed by)."""

    def poison(name: str, leaf: jnp.ndarray) -> jnp.ndarray:
        where = pages if name in ("k", "v", "latent") else slots
        return leaf.at[:, jnp.array(where, jnp.int32)].set(jnp.nan) if where else leaf

    return {group: {name: poison(name, leaf) for name, leaf in leaves.items()} for group, leaves in pool.items()}
