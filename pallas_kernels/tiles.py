"""Long chunks worked through a few steps at a time, so that no intermediate array of all steps is ever whole."""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

# Elements of the largest intermediate array of a tile: a few megabytes, so that it stays in a cache.
ELEMENTS = 1 << 21

Pages = TypeVar("Pages")


def steps(elements_per_step: int) -> int:
    """How many steps make a tile, at least one."""
    return max(1, ELEMENTS // elements_per_step)


def over(function: Callable[..., tuple[Pages, Array]], tile: int, pages: Pages, *arrays: Array) -> tuple[Pages, Array]:
    """function(pages, *arrays) -> (pages, out [B, T, ...]), `tile` steps of each array [B, T, ...] at a time.

    What fills up the last tile is 0, and what comes of it is dropped.
    """
    batch, tokens = arrays[0].shape[:2]
    if tokens <= tile:
        return function(pages, *arrays)
    count = -(-tokens // tile)

    def split(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, count * tile - tokens), *[(0, 0)] * (array.ndim - 2)))
        return jnp.moveaxis(padded.reshape(batch, count, tile, *array.shape[2:]), 1, 0)

    pages, out = lax.scan(lambda pages, step: function(pages, *step), pages, tuple(map(split, arrays)))
    return pages, jnp.moveaxis(out, 0, 1).reshape(batch, count * tile, *out.shape[3:])[:, :tokens]
