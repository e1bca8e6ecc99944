"""Fills freed state with NaN, so that reading it can't go unseen."""

import jax
import jax.numpy as jnp

from jaxhybrid.state.arrays import PoolArrays, PoolPlaces
from jaxhybrid.state.layout import StateLayout


def poison_freed(
    layout: StateLayout, places: PoolPlaces | None, pool: PoolArrays, slots: list[int], pages: list[int]
) -> PoolArrays:
    """NaN in every leaf at these slots, or at these pages if it is kept in pages; the arrays lie where they lay."""
    poisoned = {group: dict(leaves) for group, leaves in pool.items()}
    for leaf in layout.leaves:
        where = pages if leaf.growth == "paged" else slots
        if where:
            array = pool[leaf.group][leaf.name]
            poisoned[leaf.group][leaf.name] = array.at[:, jnp.array(where, jnp.int32)].set(jnp.nan)
    return poisoned if places is None else jax.device_put(poisoned, places)
