"""Decays within a chunk of tokens of Mamba-2 on TPU, two heads at a time: products of log decays with 0/1 matrices.

The log decay from token i to token t is the sum over k of (k <= t) a_k (k > i): a product of rows (k <= t) a_k, with
tokens k of two heads along lanes, and a constant matrix (k > i). It sums over just the tokens between, so strong decays
elsewhere cost it no precision, and the matrix unit does all of it, spreading the sums along lanes besides: the vector
unit would take four operations a pair of tokens for that, and the permute unit longer still.

A log decay is a sum of bfloat16 numbers: of three exactly, and of two to 2^-17 of itself, which is less than what
bfloat16 factors of the products that follow are rounded by.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu_sums import CHUNK, LANES, valid_lanes
from pallas_kernels.tpu_vectors import bfloat16_parts

_LOG2_E = 1.4426950408889634
# Log decays of a token, to the base 2, are cut here: beyond it a decay is 0 in float32 anyway.
_LEAST = -160.0


def parts(exact: bool) -> int:
    """bfloat16 numbers that a log decay is split into."""
    return 3 if exact else 2


def later_tokens(count: int, lanes: int) -> Float[Array, "K LANES+lanes"]:
    """(part, head, k) x (head, i): k is later than i; and x (head, channel): any k of that head."""
    row = jax.lax.broadcasted_iota(jnp.int32, (count * LANES, LANES + lanes), 0) % LANES
    column = jax.lax.broadcasted_iota(jnp.int32, row.shape, 1)
    channel = column - LANES
    head = jnp.where(channel < 0, column // CHUNK, channel // (lanes // 2))
    later = (channel >= 0) | (row % CHUNK > column % CHUNK)
    return jnp.where((row // CHUNK == head) & later, 1, 0).astype(jnp.bfloat16)


def scratch(chunks: int, pairs: int, lanes: int, exact: bool) -> list[Any]:
    """VMEM for `later_tokens`, and for each chunk's rows: parts of log decays, weights, `after` and `total`."""
    count = parts(exact)
    return [
        pltpu.VMEM((count * LANES, LANES + lanes), jnp.bfloat16),
        pltpu.VMEM((chunks, pairs, count * LANES), jnp.int32),
        *(pltpu.VMEM((chunks, pairs, width), jnp.float32) for width in (LANES, LANES, lanes)),
    ]


class Decays:
    """Of one chunk, by references to its rows.

    weight: dt of each token; after: what is left at the chunk's end of what a token adds, times its weight; total: the
    decay of the whole chunk, along the lanes of two heads' channels.
    """

    def __init__(self, later: Any, words: Any, weight: Any, after: Any, total: Any) -> None:
        self._later, self._words, self.weight, self.after, self.total = later, words, weight, after, total

    def prepare(self, dt: Float[Array, "pairs LANES"], A: Float[Array, "pairs LANES"], left: Int[Array, ""]) -> None:
        """Fills the rows, of which `left` tokens are valid."""
        dt = jnp.where(valid_lanes(left), dt, 0)
        count = self._words.shape[1] // LANES
        log_decays = jnp.maximum(dt * A * _LOG2_E, _LEAST)
        split = jnp.concatenate(bfloat16_parts(log_decays, count), axis=1).astype(jnp.bfloat16)
        sums = jnp.dot(split, self._later[...], preferred_element_type=jnp.float32)
        bits = jax.lax.bitcast_convert_type(split.astype(jnp.float32), jnp.int32)
        self._words[...] = bits | jax.lax.shift_right_logical(bits, 16)
        self.weight[...] = dt
        self.after[...], self.total[...] = dt * jnp.exp2(sums[:, :LANES]), jnp.exp2(sums[:, LANES:])

    def between(self, pairs: range) -> list[tuple[Float[Array, "CHUNK LANES"], Float[Array, "CHUNK lanes"]]]:
        """Of each pair the decays from token i, along lanes, to token t, 1 before it; and those up to each token."""
        upto, rows = _upto_words(), []
        for pair in pairs:
            words = self._words[pair : pair + 1]
            each = [words[:, first : first + LANES] & upto for first in range(0, words.shape[1], LANES)]
            rows.append(pltpu.bitcast(jnp.concatenate(each, axis=1), jnp.bfloat16))
        sums = jnp.exp2(jnp.dot(jnp.concatenate(rows), self._later[...], preferred_element_type=jnp.float32))
        return [(of[:, :LANES], of[:, LANES:]) for of in jnp.split(sums, len(rows))]


def _upto_words() -> Int[Array, "CHUNK/2 LANES"]:
    """Ones where a token along lanes is not after one along rows, of which a word has two."""
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK // 2, LANES), axis) for axis in (0, 1))
    lane = lane % CHUNK
    return jnp.where(lane <= 2 * row, -1, jnp.where(lane <= 2 * row + 1, -65536, 0))
