"""Rings of update records: how full they are."""

from jaxtyping import Array, Int


def next_cursors(cursors: Int[Array, " B"], lengths: Int[Array, " B"], size: int) -> Int[Array, " B"]:
    """How many records each row's ring of `size` holds after a step of buffered decode, given how many it held.

    None once it is full, for it is folded then. All layers of a model share their cursors.
    """
    return (cursors + lengths) % size
