"""The positions of the largest scores of a few queries, exactly, from scores that are in VMEM on a TPU.

A float's bits, ordered as integers, give the k-th largest one by one from the top: each bit takes one count of the
scores above. Then the positions are compacted. What stands in the n-th place is found by the matrix unit, from ranks
within rows of 128 and the rows' sums. No score is moved, and none is compared with another.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

LANES = 128
# Rows of scores that are compacted together, and places that are filled together; of a short context, more.
ROWS, PLACES, _MANY_PLACES = 128, 512, 2048
# Of a position that no query sees; below the key of any number.
UNSEEN = -(1 << 31)
_REGISTER = 8


def ordered(scores: Float[Array, "*_"]) -> Int[Array, "*_"]:
    """Integers in the order of the scores. Both zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def padded(rows):
    """Rows of scores that are looked at where so many are written."""
    return (rows + ROWS - 1) // ROWS * ROWS if isinstance(rows, int) else jax.lax.div(rows + ROWS - 1, ROWS) * ROWS


def rows_counted(tokens: int) -> int:
    """Rows of each query's scores that a trip of a counting loop takes."""
    return max(_REGISTER, ROWS // tokens)


def places_filled(rows: int, places: int) -> int:
    """Of so many places, those that are filled together from as many rows of scores as there may be."""
    return _MANY_PLACES if rows <= ROWS and places % _MANY_PLACES == 0 else PLACES


def limits(keys, rows, top_k: int) -> tuple[Int[Array, "t 1 128"], Int[Array, "t 1 128"]]:
    """The key of each query's top_k-th best, or `UNSEEN` if it sees fewer; and of keys like it, the last position that
    is among the best. All lanes are equal.

    keys: a reference [t, R, 128]; of its rows, `rows` rounded up to `ROWS` hold `ordered` scores or `UNSEEN`.
    """
    tokens, total = keys.shape[:2]
    height = rows_counted(tokens)
    blocks = jax.lax.div(rows + height - 1, height)

    def count(hit) -> Float[Array, "t 1 128"]:
        """How many keys `hit` holds for, of (keys, positions) of some rows."""

        def add(block, sums):
            first = pl.multiple_of(block * height, height)
            some = keys[:, pl.ds(first, height)]
            row, lane = (jax.lax.broadcasted_iota(jnp.int32, (1, height, LANES), axis) for axis in (1, 2))
            hits = jnp.where(hit(some, (first + row) * LANES + lane), 1.0, 0.0)
            return sums + hits.reshape(tokens, -1, _REGISTER, LANES).sum(axis=1)

        sums = jax.lax.fori_loop(0, blocks, add, jnp.zeros((tokens, _REGISTER, LANES), jnp.float32))
        whole = sums.sum(axis=1, keepdims=True).sum(axis=2, keepdims=True)
        return jnp.broadcast_to(whole, (tokens, 1, LANES))

    def raise_key(step, least):
        candidate = least ^ (jnp.int32(1) << (31 - step))
        return jnp.where(count(lambda some, _: some >= candidate) >= top_k, candidate, least)

    least = jax.lax.fori_loop(0, 32, raise_key, jnp.full((tokens, 1, LANES), UNSEEN, jnp.int32))
    wanted = top_k - count(lambda some, _: some > least)
    ties = count(lambda some, _: some == least)
    tied = jnp.where((ties > wanted) & (least > UNSEEN), 1.0, 0.0).max() > 0
    bits = (total * LANES - 1).bit_length()

    def raise_position(step, last):
        candidate = last | (jnp.int32(1) << (bits - 1 - step))
        before = count(lambda some, position: (some == least) & (position < candidate))
        return jnp.where(before < wanted, candidate, last)

    first = jnp.full((tokens, 1, LANES), jnp.where(tied, 0, total * LANES), jnp.int32)
    return least, jax.lax.fori_loop(0, jnp.where(tied, bits, 0), raise_position, first)


def compact(keys, rows, least, last, token: Any, out) -> None:
    """Writes the positions of a token's best keys to out[token], in ascending order, then -1.

    least, last: references that hold what `limits` found [t, 1, 128]. out: [t, n, 128], n * 128 a multiple of `PLACES`.
    """
    out[token] = jnp.full(out.shape[1:], -1, jnp.int32)
    width = places_filled(keys.shape[1], out.shape[1] * LANES)

    def rows_into_places(block, filled):
        first = pl.multiple_of(block * ROWS, ROWS)
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, (ROWS, LANES), axis) for axis in (0, 1))
        some, limit = keys[token, pl.ds(first, ROWS)], least[token]
        like = (some == limit) & ((first + row) * LANES + lane <= last[token]) & (limit > UNSEEN)
        best = jnp.where((some > limit) | like, 1.0, 0.0)
        ones, before = jnp.ones((LANES, LANES), jnp.bfloat16), jnp.where(row <= lane, 1.0, 0.0)
        ranks = _product(best, before) * best
        counts = _product(best, ones)
        ends = _product(jnp.where(lane <= row, 1.0, 0.0), counts)
        found = ends[ROWS - 1 :, :1].astype(jnp.int32)[0, 0]

        @pl.loop(jax.lax.div(filled, width), jax.lax.div(filled + found + width - 1, width))
        def _(places):
            number, inside = _numbers(ranks, ends - counts, ends, places * width - filled, found, width)
            for tile in range(width // LANES):
                at = (token, pl.ds(places * (width // LANES) + tile, 1))
                here = slice(tile * LANES, (tile + 1) * LANES)
                out[at] = jnp.where(inside[:, here], first * LANES + number[:, here], out[at])

        return filled + found

    jax.lax.fori_loop(0, jax.lax.div(rows + ROWS - 1, ROWS), rows_into_places, jnp.int32(0))


def _numbers(ranks, starts, ends, first, found, width: int):
    """Where those of ROWS x 128 keys are that go to `width` places from the `first`, counted from the rows' own first;
    and which of the places are theirs: [1, width].

    ranks: of a key in its row, from 1, or 0; starts, ends: keys chosen before and up to each row, in all lanes.
    """
    wide = (ROWS, width)
    place = (first + jax.lax.broadcasted_iota(jnp.int32, wide, 1)).astype(jnp.float32)
    starts, ends = (jnp.concatenate([x] * (width // LANES), axis=1) for x in (starts, ends))
    here = (starts <= place) & (place < ends)
    row = jax.lax.broadcasted_iota(jnp.int32, wide, 0).astype(jnp.float32)
    own_row = jnp.where(here, row, 0.0).sum(axis=0, keepdims=True)
    before = jnp.where(here, starts, 0.0).sum(axis=0, keepdims=True)
    # Of each place the ranks in its row, a column.
    own = _product(ranks, jnp.where(here, 1.0, 0.0), contract=0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, width), 0).astype(jnp.float32)
    number = jnp.where(own == place[:1] - before + 1, lane, 0.0).sum(axis=0, keepdims=True)
    inside = (place[:1] >= 0) & (place[:1] < found.astype(jnp.float32))
    return (own_row * LANES + number).astype(jnp.int32), inside


def _product(x, y, contract: int = 1):
    """x y, or x^T y, of integers up to 256."""
    x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    return jax.lax.dot_general(x, y, (((contract,), (0,)), ((), ())), preferred_element_type=jnp.float32)
