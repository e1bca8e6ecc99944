"""Arrays on the devices, and in the order of their dimensions, that a place names."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped


def row_major(dimensions: int, where: Sharding | None) -> Format:
    """Last dimension first, on these devices (by default the first one), whatever a compiler would rather have."""
    return Format(Layout(tuple(range(dimensions))), where or SingleDeviceSharding(jax.devices()[0]))


def zeros(shape: tuple[int, ...], dtype: DTypeLike, place: Sharding | Format | None) -> Shaped[Array, "..."]:
    """`jnp.zeros` there. A format takes a program: nothing else has results in any order of dimensions."""
    if isinstance(place, Format):
        return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=place)()
    return jnp.zeros(shape, dtype, device=place)
