"""The arrays of a state pool: zeros to begin with, donated to every program and returned by it."""

from collections.abc import Mapping

from jax.experimental.layout import Format
from jax.sharding import Sharding
from jaxtyping import Array

from jaxhybrid.errors import ConfigError
from jaxhybrid.placement import zeros
from jaxhybrid.state.layout import LeafSpec, StateLayout

PoolArrays = dict[str, dict[str, Array]]  # group -> leaf -> [layers, slots, ...] or [layers, pages, page_size, ...]
PoolPlaces = dict[str, dict[str, Sharding | Format]]  # likewise: on which devices each array lies, and in which order


def leaf_shape(leaf: LeafSpec, slots: int, pages: int, page_size: int) -> tuple[int, ...]:
    """Shape of one leaf's array in a pool of that size.

    Raises ConfigError if a page is not a multiple of the tokens that share an entry of the leaf.
    """
    if leaf.growth == "paged":
        if page_size % leaf.stride:
            raise ConfigError(
                f"page_size={page_size} must be a multiple of {leaf.stride}: "
                f"so many tokens share one of the {leaf.name} of {leaf.group}"
            )
        return (leaf.layers, pages, page_size // leaf.stride, *leaf.shape)
    return (leaf.layers, slots, *leaf.shape)


def pool_arrays(
    layout: StateLayout,
    slots: int,
    pages: int,
    page_size: int,
    places: PoolPlaces | None = None,
) -> PoolArrays:
    """Slot 0 and page 0 are the null slot and page: `slots` and `pages` count them."""
    arrays: PoolArrays = {}
    for leaf in layout.leaves:
        shape = leaf_shape(leaf, slots, pages, page_size)
        place = None if places is None else places[leaf.group][leaf.name]
        arrays.setdefault(leaf.group, {})[leaf.name] = zeros(shape, leaf.dtype, place)
    return arrays


def bytes_by_kind(layout: StateLayout, slots: int, pages: int, page_size: int) -> Mapping[str, int]:
    """Bytes of that many slots and pages, by kind of state: `recurrent`, `conv`, `logits`, `kv`, `latent`."""
    totals: dict[str, int] = {}
    for leaf in layout.leaves:
        kind = "kv" if leaf.name in ("k", "v") else "conv" if leaf.name.startswith("conv") else leaf.name
        count = pages * page_size if leaf.growth == "paged" else slots
        totals[kind] = totals.get(kind, 0) + leaf.bytes * count
    return totals
