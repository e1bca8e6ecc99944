"""Update records in the kernels in Pallas' Triton dialect: taken in turn, and left in rings.

A program holds a part of one state, and what of a record goes with that part. What a record has besides, such as a key
that several programs use, one of them writes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

COMPILER_PARAMS = triton.CompilerParams(num_warps=4, num_stages=1)
# Inputs of so many tokens or records are in flight at once.
_TOGETHER = 4


def integers(layer: int | Int[Array, ""], *rows: Int[Array, " B"]) -> list[Int[Array, " _"]]:
    """As a kernel takes them."""
    return [jnp.asarray(layer, jnp.int32).reshape(1), *(x.astype(jnp.int32) for x in rows)]


def cost(
    state: Array, batch: int, moves: int, flops: int, exponentials: int, *arrays: Array | jax.ShapeDtypeStruct
) -> pl.CostEstimate:
    """Of states [L, N, ...] read and perhaps written, `flops` for each number of a row's, and of arrays moved whole."""
    numbers = batch * math.prod(state.shape[2:])
    return pl.CostEstimate(
        flops=flops * numbers,
        transcendentals=exponentials,
        bytes_accessed=moves * numbers * state.dtype.itemsize + sum(x.size * x.dtype.itemsize for x in arrays),
    )


def in_turn(
    count: Any, most: int, load: Callable[[Any], Any], use: Callable[[Any, Any, Array], Array], carry: Array
) -> Array:
    """The last of `carry = use(n, load(n), carry)` for n = 0, 1, ... `count` - 1, where `count` is at most `most`.

    It goes on to the end of a few that are loaded together: what is behind `count`, both functions are to mask.
    """
    together = min(_TOGETHER, most)

    def some(index: Any, carry: Array) -> Array:
        numbers = [index * together + n for n in range(together)]
        for number, inputs in zip(numbers, [load(number) for number in numbers], strict=True):
            carry = use(number, inputs, carry)
        return carry

    return jax.lax.fori_loop(0, pl.cdiv(count, together), some, carry)


def load_masked(ref: Any, index: tuple[Any, ...], mask: Any) -> Array:
    """ref[*index] in float32, and 0 where masked, whatever is there."""
    return triton.load(ref.at[*index], mask=mask, other=0).astype(jnp.float32)


class RingStep(NamedTuple):
    """A row's step of buffered decode: a layer, slots, records in a ring of `size`, and whether there is a token."""

    layer: Any
    read_slot: Any
    write_slot: Any
    cursor: Any
    valid: Any
    size: int

    @property
    def fills(self) -> Any:
        """Whether the token's record is the last that the ring has room for: all are then folded."""
        return self.valid & (self.cursor == self.size - 1)

    @property
    def moves(self) -> Any:
        """Whether the row leaves its read slot as it is."""
        return self.read_slot != self.write_slot

    def leave_state(self, ref: Any, index: tuple[Any, ...], folded: Float[Array, "*part"], before: Array) -> None:
        """At ref[layer, slot, *index], unless it is there already: `folded` in a step that fills, else `before`."""
        new = jnp.where(self.fills, folded.astype(ref.dtype), before)
        triton.store(ref.at[self.layer, self.write_slot, *index], new, mask=self.fills | self.moves)

    def leave_record(self, ring: Any, new_ring: Any, index: tuple[Any, ...], record: Array, mine: Any = True) -> None:
        """At new_ring[layer, slot, cursor, *index], and with it those before, where a row moves.

        `mine`: this program is the one that does. A ring that is filled is not read again.
        """
        keeps = jnp.logical_not(self.fills) & mine
        place = self.layer, self.write_slot, self.cursor
        triton.store(new_ring.at[*place, *index], record, mask=keeps & self.valid)

        def copy(number: Any, _: Any) -> None:
            old = triton.load(ring.at[self.layer, self.read_slot, number, *index])
            triton.store(new_ring.at[self.layer, self.write_slot, number, *index], old)

        jax.lax.fori_loop(0, jnp.where(keeps & self.moves, self.cursor, 0), copy, None)
