"""Scores of index keys on a TPU, for queries of some sequences, from keys that are copied a block ahead.

Nothing branches in a block: each page's copy has its own condition, so that the compiler lays the copies' addresses,
the matrix unit's products and the sums over heads side by side.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.paged_fetch_tpu import LANES, Blocks
from pallas_kernels.sparse_attention.tpu_select import UNSEEN, ordered

# Keys that are scored in one piece of straight code: a whole register of one query's scores.
PIECE = 8 * LANES


@dataclass(frozen=True)
class Plan:
    """Of one grid step: sequences, query tokens of each, blocks of keys, and rows of 128 scores that a query may have.

    `parts`: of so many query tokens each, that a sequence's queries are cut into; more than one of one sequence alone.
    """

    sequences: int
    tokens: int
    parts: int
    keyed: Blocks
    rows: int

    @property
    def queries(self) -> int:
        """Of a step."""
        return self.sequences * self.tokens

    @property
    def heads_first(self) -> bool:
        """Whether rows of queries go by heads, then tokens: sums over heads then stay within a register's rows."""
        return self.tokens % 8 == 0

    def scored(self, end: Any) -> Any:
        """Rows of scores that are written for queries that see up to `end` keys."""
        return jnp.maximum(_quotient(end, self.keyed.keys), 1) * (self.keyed.keys // LANES)


class _Copies:
    """Of the pages of a block [keys, dI], to one of the two buffers [2, keys, dI].

    table: a reference of page ids, rows of `table_width`, and as many more as a block has pages; pages [n, page, dI].
    """

    def __init__(self, keyed: Blocks, table, pages, buffer, semaphores) -> None:
        self._keyed, self._table, self._pages = keyed, table, pages
        self._buffer, self._semaphores = buffer, semaphores

    def count(self, end, index) -> Any:
        """How many pages of a row's block hold keys before its end."""
        return jnp.clip(_quotient(end, self._keyed.page) - index * self._keyed.pages, 0, self._keyed.pages)

    def start(self, row, index, count, slot, places: range) -> None:
        """Of those `places` of a block that are less than `count`."""
        keyed = self._keyed
        first = row * keyed.table_width + index * keyed.pages
        for place in places:
            page = self._table[first + place]
            target = self._buffer.at[slot, pl.ds(place * keyed.page, keyed.page)]
            copy = pltpu.make_async_copy(self._pages.at[page], target, self._semaphores.at[slot])
            pl.when(place < count)(copy.start)

    def wait(self, count, slot) -> None:
        """For so many pages."""

        def wait(keys):
            some = self._buffer.at[slot, pl.ds(0, keys)]
            pltpu.make_async_copy(some, some, self._semaphores.at[slot]).wait()

        whole = self._keyed.pages
        pl.when(count == whole)(lambda: wait(self._keyed.keys))
        pl.when(count != whole)(lambda: pl.loop(0, count)(lambda _: wait(self._keyed.page)))


def write(
    cut: Plan, reach, table, ends, q, columns, seen, pages, keys, buffer, kept_slot, semaphores
) -> None:  # fmt: skip
    """The keys of the scores of a step's queries, to rows up to `reach` of `keys`; `UNSEEN` where they see nothing.

    References. table: as `_Copies` takes it; ends: keys that any query sees of each step's sequences, as one list; q
    [sequences, tokens HI, dI]; columns: weights [sequences tokens HI, 128], equal along lanes; seen [queries, 128];
    keys [queries, R, 128]; kept_slot [1]: of the first block, which the step before has started.
    """
    step, steps = pl.program_id(1), pl.num_programs(1)
    first = (pl.program_id(0) * steps + step) * cut.sequences
    last = (pl.program_id(0) + 1) * steps * cut.sequences - 1
    copies = _Copies(cut.keyed, table, pages, buffer, semaphores)
    every, pieces = cut.keyed.pages, cut.keyed.keys // PIECE

    def row(number):
        return number if cut.parts == 1 else jax.lax.div(number, jnp.int32(cut.parts))

    @pl.when(step == 0)
    def _():
        kept_slot[0] = 0
        copies.start(row(first), 0, copies.count(ends[first], 0), 0, range(every))

    def sequence(own, slot):
        number = first + own
        here, following = ends[number], jnp.minimum(number + 1, last)
        scored = cut.scored(here)
        count = jax.lax.div(scored, jnp.int32(cut.keyed.keys // LANES))
        queries = pl.ds(own * cut.tokens, cut.tokens)

        def block(index, slot):
            leaves = index + 1 == count
            ahead_row, ahead = row(jnp.where(leaves, following, number)), jnp.where(leaves, 0, index + 1)
            pending = copies.count(jnp.where(leaves, ends[following], here), ahead)
            pending = jnp.where(leaves & (number == last), 0, pending)
            copies.wait(copies.count(here, index), slot)
            for piece in range(pieces):
                at = (index * pieces + piece) * PIECE
                _score(cut, at, buffer[slot, piece * PIECE : (piece + 1) * PIECE], own, q, columns, seen, keys)
                # The first half's products are begun before copies are, since no load passes one that is started.
                begun, end = (every * max(0, 2 * n - pieces) // pieces for n in (piece, piece + 1))
                copies.start(ahead_row, ahead, pending, 1 - slot, range(begun, end))
            return 1 - slot

        slot = jax.lax.fori_loop(0, count, block, slot)

        @pl.loop(jax.lax.div(scored, 8), jax.lax.div(reach + 7, 8))
        def _(block):
            keys[queries, pl.ds(pl.multiple_of(block * 8, 8), 8)] = jnp.full((cut.tokens, 8, LANES), UNSEEN, jnp.int32)

        return slot

    if cut.sequences == 1:
        kept_slot[0] = sequence(0, kept_slot[0])
    else:
        kept_slot[0] = jax.lax.fori_loop(0, cut.sequences, sequence, kept_slot[0])


def _quotient(x, by: int) -> Any:
    """x / by, rounded up."""
    return jax.lax.div(x + (by - 1), jnp.int32(by))


def _score(cut: Plan, first, block: Float[Array, "S dI"], own, q, columns, seen, keys) -> None:
    """Writes the keys of a piece's scores, from position `first`, for a sequence of the step."""
    (rows, _), tokens = q.shape[1:], cut.tokens
    precision = "highest" if q.dtype == jnp.float32 else None
    each = jax.lax.dot_general(
        q[own], block, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    weights = columns[pl.ds(pl.multiple_of(own * rows, 8), rows)]
    limit = seen[pl.ds(own * tokens, tokens)]

    def weighed(tile):
        return jnp.maximum(each[:, tile * LANES : (tile + 1) * LANES], 0) * weights

    if cut.heads_first:
        for tile in range(PIECE // LANES):
            total = weighed(tile).reshape(rows // tokens, tokens, LANES).sum(axis=0)
            position = first + tile * LANES + jax.lax.broadcasted_iota(jnp.int32, total.shape, 1)
            key = jnp.where(position < limit, ordered(total), UNSEEN)
            keys[:, pl.ds(jax.lax.div(first, LANES) + tile, 1)] = key[:, None]
    else:
        tiles = [weighed(tile).reshape(tokens, -1, 8, LANES).sum(axis=1) for tile in range(PIECE // LANES)]
        total = _sums_in_rows(tiles)
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, total.shape, axis) for axis in (1, 2))
        key = jnp.where(first + row * LANES + lane < limit[:, None], ordered(total), UNSEEN)
        keys[pl.ds(own * tokens, tokens), pl.ds(pl.multiple_of(jax.lax.div(first, LANES), 8), 8)] = key


def _sums_in_rows(tiles: list[Float[Array, "t 8 128"]]) -> Float[Array, "t 8 128"]:
    """Row n of the result is the sum over the rows of the n-th of eight tiles.

    Two tiles become one, with sums of two rows, then of four, then of eight; a row's other half is a rotation away.
    """
    row, distance = jax.lax.broadcasted_iota(jnp.int32, tiles[0].shape, 1), 1
    while len(tiles) > 1:
        even = (row & distance) == 0
        pairs = zip(tiles[::2], tiles[1::2], strict=True)
        tiles = [jnp.where(even, x, y) + pltpu.roll(jnp.where(even, y, x), 8 - distance, 1) for x, y in pairs]
        distance *= 2
    return tiles[0]
