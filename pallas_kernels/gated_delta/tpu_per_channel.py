"""What a chunk of the gated delta rule has before its states are known, where each key channel has its own decay (KDA).

Blocks of tokens are doubled from 1 to a chunk; a pair of tokens meets where its two tokens first fall into one block.
The decay between them is that from the one to the end of the left half times that from there to the other.

A sublane tile has 8 rows. Steps over blocks of fewer rows shift rows within a tile and mask; steps over whole tiles
take only the rows that matter.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gated_delta import tpu_inverse
from pallas_kernels.gated_delta.tpu_chunk import Kept, Keys, Steps
from pallas_kernels.gated_delta.tpu_inverse import joined, left, right
from pallas_kernels.tpu_sums import CHUNK, valid_lanes

# Halves of the blocks that are doubled: within a sublane tile, and of whole tiles.
_TILE = 8
_SMALL, _LARGE = (1, 2, 4), (8, 16, 32)


def prepare(keys: Keys, log_decay: Any, beta: Any, kept: Kept, valid: Int[Array, ""]) -> list[Steps]:
    """The work of each pair of heads, up to what it writes to `kept`, for the first `valid` tokens.

    References: log_decay [C, hv dk], beta [pairs, L].
    """
    weights = jnp.where(valid_lanes(valid), beta[...], 0)
    columns = weights.T
    return [
        _run(pair, keys, log_decay, weights[pair : pair + 1], columns[:, pair : pair + 1], kept, valid)
        for pair in range(len(weights))
    ]


def _run(
    pair: int, keys: Keys, log_decay: Any, beta: Float[Array, "1 L"], column: Float[Array, "L 1"], kept: Kept,
    valid: Int[Array, ""],
) -> Steps:  # fmt: skip
    """Of one pair; beta along lanes and, as `column`, along sublanes."""
    key_heads, value_heads = keys.of_pair(pair), range(2 * pair, min(2 * pair + 2, kept.seeing.shape[0]))
    heads = [
        _Head(*keys.normalised(key_heads[i]), log_decay[:, head * keys.width : (head + 1) * keys.width], valid)
        for i, head in enumerate(value_heads)
    ]
    row, other, lane_head = tpu_inverse.tokens()
    kk = jnp.zeros(row.shape, jnp.float32)
    own = keys.side_by_side([jnp.broadcast_to((x.q * x.k).sum(axis=1, keepdims=True), row.shape) for x in heads])
    qk = jnp.where(row == other, own, 0)
    yield
    for half in (*_SMALL, *_LARGE):
        factors = [x.factors(half) for x in heads]
        columns = jnp.concatenate([of_head.astype(keys.dot.dtype) for _, of_head in (factors[0], factors[-1])])
        found = keys.side_by_side([keys.dot(rows, columns, (1, 1)) for rows, _ in factors])
        kk, qk = (_met(x, part, half) for x, part in zip((kk, qk), jnp.split(found, 2), strict=True))
        for x in heads:
            x.double(half)
        yield
    keys.keep_seeing(pair, [(x.before,) * 2 for x in heads], kept)
    for head, x in zip(value_heads, heads, strict=True):
        kept.total[head : head + 1] = x.before[CHUNK - 1 :]
    later = jnp.concatenate([x.k * x.after for x in (heads[0], heads[-1])])
    kept.later[pair, :CHUNK] = qk.astype(keys.dot.dtype)
    kept.later[pair, CHUNK:] = later.astype(keys.dot.dtype).T
    yield
    of_row = jnp.where(lane_head == 0, column[:CHUNK], column[CHUNK:])
    solution = yield from tpu_inverse.inverse(of_row * kk, keys.dot)
    kept.solution[pair] = (solution.astype(jnp.float32) * beta).astype(keys.dot.dtype)


def _met(x: Float[Array, "C L"], found: Float[Array, "_ L"], half: int) -> Float[Array, "C L"]:
    """x with the pairs of tokens of this step, of which `found` has all rows or those of right halves."""
    corner = tpu_inverse.corner(half)
    if half in _SMALL:
        return jnp.where(corner, found, x)
    return joined(left(x, half), jnp.where(right(corner, half), found, right(x, half)), half)


class _Head:
    """A head's vectors, and the decays of its blocks [C, dk]: before and with each token, and after it."""

    def __init__(
        self, k: Float[Array, "C dk"], q: Float[Array, "C dk"], log_decay: Float[Array, "C dk"], valid: Int[Array, ""]
    ) -> None:
        self.k, self.q = k, q
        self._row = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0)
        self.before = jnp.exp(jnp.where(self._row < valid, log_decay.astype(jnp.float32), 0))
        self.after, self._total = jnp.ones_like(self.before), self.before

    def factors(self, half: int) -> tuple[Float[Array, "_ dk"], Float[Array, "C dk"]]:
        """k and, below, q, of right halves at least; k, of left halves at least; each with the decay between them."""
        if half in _SMALL:
            near = jnp.where(self._is_right(half), self.before, self.after)
            return jnp.concatenate([self.k * near, self.q * near]), self.k * near
        rows = [right(x, half) * right(self.before, half) for x in (self.k, self.q)]
        return jnp.concatenate(rows), self.k * self.after

    def double(self, half: int) -> None:
        """Decays of blocks of twice the size."""
        if half in _SMALL:
            on_right = self._is_right(half)
            sibling = jnp.where(on_right, _rolled(self._total, half), _rolled(self._total, _TILE - half))
            self.before = jnp.where(on_right, self.before * sibling, self.before)
            self.after = jnp.where(on_right, self.after, self.after * sibling)
            self._total = self._total * sibling
        else:
            last_left, last_right = (_last_row(side(self.before, half), half) for side in (left, right))
            self.before = joined(left(self.before, half), right(self.before, half) * last_left, half)
            self.after = joined(left(self.after, half) * last_right, right(self.after, half), half)

    def _is_right(self, half: int) -> Bool[Array, "C 1"]:
        return (self._row & half) != 0


def _rolled(x: Float[Array, "C d"], rows: int) -> Float[Array, "C d"]:
    """Each tile's rows moved on by so many, around the tile."""
    return pltpu.roll(x.reshape(-1, _TILE, x.shape[1]), rows, 1).reshape(x.shape)


def _last_row(x: Float[Array, "C/2 d"], half: int) -> Float[Array, "C/2 d"]:
    """Each half's last row, in all its rows."""
    lasts = [x[stop - 1 : stop] for stop in range(half, CHUNK // 2 + 1, half)]
    return jnp.concatenate([jnp.broadcast_to(x, (half, x.shape[1])) for x in lasts])
