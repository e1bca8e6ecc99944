"""Inverses of the unit lower triangular systems of a chunk's tokens, for two heads side by side.

Blocks of 8 tokens on the diagonal are inverted by substitution, sixteen of them (two heads, eight blocks) along the
lanes of one register. Then blocks are doubled by elimination: [[A, 0], [X, D]]^-1 = [[A^-1, 0], [-D^-1 X A^-1, D^-1]].
A product of both heads has one factor block diagonal. Unlike a power series this stays accurate for repeated keys.
"""

from collections.abc import Generator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tpu_sums import CHUNK, LANES
from pallas_kernels.tpu_vectors import Dot

_BLOCK = 8
# Rows of bfloat16 that fill a tile: halves of fewer are put together as float32.
_PACKED = 16
# Columns that are eliminated before other work gets its turn.
_TURN = 3


def tokens() -> tuple[Int[Array, "C L"], Int[Array, "C L"], Int[Array, "C L"]]:
    """Of [C, (head, token)] arrays: the row's token, the lane's token, and the lane's head."""
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), axis) for axis in (0, 1))
    return row, lane % CHUNK, lane // CHUNK


def corner(half: int) -> Bool[Array, "C L"]:
    """Whether a row's token is in the right, and a lane's in the left half of the same block of 2 half tokens."""
    row, other, _ = tokens()
    apart = row ^ other
    return (apart >= half) & (apart < 2 * half) & (row > other)


def left(x: Array, half: int) -> Array:
    """The rows of all left halves of blocks of 2 half rows."""
    return jnp.concatenate([x[start : start + half] for start in range(0, CHUNK, 2 * half)])


def right(x: Array, half: int) -> Array:
    """The rows of all right halves."""
    return jnp.concatenate([x[start : start + half] for start in range(half, CHUNK, 2 * half)])


def joined(left: Array, right: Array, half: int) -> Array:
    """All rows again."""
    return jnp.concatenate([x[start : start + half] for start in range(0, CHUNK // 2, half) for x in (left, right)])


def block_diagonal(x: Float[Array, "C L"]) -> Float[Array, "L L"]:
    """Each head's matrix in its own rows and lanes."""
    head = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) // CHUNK
    return jnp.concatenate([jnp.where(head == h, x, jnp.zeros_like(x)) for h in range(LANES // CHUNK)])


def inverse(x: Float[Array, "C L"], dot: Dot) -> Generator[None, None, Float[Array, "C L"]]:
    """Of the identity plus x's part below the diagonal, in the dtype of `dot`'s factors. Yields while products run."""
    found = yield from _inverse_blocks(x)
    half = _BLOCK
    while half < CHUNK:
        if half == _PACKED:
            found = found.astype(dot.dtype)
        rows = right(corner(half), half)
        below = jnp.where(rows, right(x, half), 0)
        product = dot(below, block_diagonal(found.astype(dot.dtype))).astype(found.dtype)
        yield
        product = block_diagonal(joined(jnp.zeros_like(product), product, half).astype(dot.dtype))
        below = -dot(right(found, half), product)
        yield
        found = joined(left(found, half), jnp.where(rows, below.astype(found.dtype), right(found, half)), half)
        half *= 2
    return found


def _inverse_blocks(x: Float[Array, "C L"]) -> Generator[None, None, Float[Array, "C L"]]:
    """The inverses of the blocks on the diagonal, each in its rows and lanes."""
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (_BLOCK, LANES), axis) for axis in (0, 1))
    block, column_of_block = lane % CHUNK // _BLOCK, lane % _BLOCK
    blocks = x[:_BLOCK]
    for b in range(1, CHUNK // _BLOCK):
        blocks = jnp.where(block == b, x[b * _BLOCK : (b + 1) * _BLOCK], blocks)
    blocks = jnp.where(row > column_of_block, blocks, 0)
    found = jnp.where(row == column_of_block, 1.0, 0.0)
    for column in range(_BLOCK - 1):
        factors = jnp.take_along_axis(blocks, lane - column_of_block + column, axis=1)
        found = found - factors * found[column : column + 1]
        if column % _TURN == _TURN - 1:
            yield
    return jnp.concatenate([jnp.where(block == b, found, 0) for b in range(CHUNK // _BLOCK)])
