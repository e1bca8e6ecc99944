"""Reading and writing the rows of a state array by slot, without ever copying the array.

A state array [L, N, ...] holds N slots in each of L layers. XLA updates a donated array in place only if it knows that
every read of it is over by then; otherwise it copies all of it, slots of other sequences included.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def read(
    state: Float[Array, "L N *slot"], layer: int | Int[Array, ""], slots: Int[Array, " B"]
) -> Float[Array, "B *slot"]:
    """state[layer, slots], materialised.

    Reading one slot becomes a slice, which XLA fuses into everything that uses it, the write included, or orders
    neither before nor after the write; either way it then copies the state. A gather of two it keeps.
    """
    if slots.shape[0] == 1:
        return state[layer, jnp.tile(slots, 2)][:1]
    return state[layer, slots]


def checkpoint_options(
    checkpoint_lengths: Int[Array, "B M"] | None, checkpoint_slots: Int[Array, "B M"] | None
) -> dict[str, Array]:
    """Of a call that keeps states at boundaries besides; none without. Raises ValueError for one of the two alone."""
    if checkpoint_lengths is None and checkpoint_slots is None:
        return {}
    if checkpoint_lengths is None or checkpoint_slots is None:
        given, missing = ("slots", "lengths") if checkpoint_lengths is None else ("lengths", "slots")
        raise ValueError(f"checkpoint_{given} without checkpoint_{missing}: expected both, or neither")
    if checkpoint_lengths.shape != checkpoint_slots.shape:
        raise ValueError(
            f"checkpoint_lengths and checkpoint_slots: expected one shape [B, M], "
            f"got {checkpoint_lengths.shape} and {checkpoint_slots.shape}"
        )
    return {"checkpoint_lengths": checkpoint_lengths, "checkpoint_slots": checkpoint_slots}


def write(
    state: Float[Array, "L N *slot"],
    layer: int | Int[Array, ""],
    slots: Int[Array, " B"],
    new_slot: Callable[[Int[Array, ""]], Float[Array, "*slot"]],
    *,
    least_rounds: int = 2,
) -> Float[Array, "L N *slot"]:
    """The state with slots[b] of the layer set to new_slot(b): on CPU a scatter takes twice as long as this loop.

    `least_rounds`: of the loop, over the last row again if there are fewer rows.
    """

    rows = slots.shape[0]

    def body(index, state):
        row = jnp.minimum(index, rows - 1)
        new = new_slot(row).astype(state.dtype)
        return jax.lax.dynamic_update_slice(state, new[None, None], (layer, slots[row], *(0,) * new.ndim))

    # One round would be unrolled and its write fused with the next layer's read, and XLA then writes to a copy of the
    # whole array. To write one row twice costs less; large states, which XLA does not fuse, can ask for one round.
    return jax.lax.fori_loop(0, max(rows, least_rounds), body, state)
