"""States at requested boundaries of a prefill, for the kernels in Pallas' Triton dialect.

The tokens between two boundaries are a segment, worked through chunk by chunk. A chunk that a boundary divides is taken
twice, each time with the tokens of one segment alone: the others neither decay nor update.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int


def segments(
    lengths: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    checkpoint_lengths: Int[Array, "B M"] | None,
    checkpoint_slots: Int[Array, "B M"] | None,
) -> tuple[Int[Array, "B M+2"], Int[Array, "B M+1"]]:
    """Where each row's segments begin and the last one ends, and where the state after each goes, or -1.

    Arguments as of `pallas_kernels.gated_delta.gated_delta`.
    """
    ends, slots = lengths[:, None], write_slots[:, None]
    if checkpoint_lengths is not None and checkpoint_slots is not None:
        kept = (checkpoint_lengths > 0) & (checkpoint_slots > 0)
        checkpoints, order = jnp.where(kept, checkpoint_lengths, 0), jnp.argsort(jnp.where(kept, checkpoint_lengths, 0))
        checkpoints, kept_in = (
            jnp.take_along_axis(x, order, axis=1) for x in (checkpoints, jnp.where(kept, checkpoint_slots, -1))
        )
        ends, slots = jnp.concatenate([checkpoints, ends], axis=1), jnp.concatenate([kept_in, slots], axis=1)
    return jnp.pad(ends, ((0, 0), (1, 0))).astype(jnp.int32), slots.astype(jnp.int32)


def run(
    bounds: Any,
    slots: Any,
    row: Int[Array, ""],
    size: int,
    chunk: Callable[[Any, Array, Any], Array],
    state: Float[Array, "*part"],
    store: Callable[[Any, Array], None],
) -> None:
    """Works through a row in a kernel that has both arrays of `segments` whole.

    `chunk(number, valid, state)`: the next state after those tokens of the chunk of `size` that are valid.
    `store(slot, state)` writes a segment's state.
    """

    def segment(index: Any, first: Any, state: Array) -> Array:
        last = bounds[row, index + 1]

        def masked(number: Any, state: Array) -> Array:
            token = number * size + jnp.arange(size)
            valid = token < last
            # Nothing is before a row's only segment: the compiler need not know of a bound.
            return chunk(number, valid if isinstance(first, int) else valid & (token >= first), state)

        state = jax.lax.fori_loop(first // size, pl.cdiv(last, size), masked, state)
        pl.when(slots[row, index] >= 0)(lambda: store(slots[row, index], state))
        return state

    if slots.shape[1] == 1:
        segment(0, 0, state)
    else:
        jax.lax.fori_loop(0, slots.shape[1], lambda index, state: segment(index, bounds[row, index], state), state)
