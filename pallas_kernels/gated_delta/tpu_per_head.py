"""What a chunk of the gated delta rule has before its states are known, where each head has one decay a token."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tpu_sums
from pallas_kernels.gated_delta import tpu_inverse
from pallas_kernels.gated_delta.tpu_chunk import Kept, Keys, Steps
from pallas_kernels.tpu_sums import CHUNK, LANES


def prepare(
    keys: Keys, log_decay: Any, beta: Any, constants: Sequence[Any], kept: Kept, valid: Int[Array, ""]
) -> list[Steps]:
    """The work of each pair of heads, up to what it writes to `kept`, for the first `valid` tokens.

    References: log_decay, beta [pairs, L]; constants as `tpu_sums.constants` has them.
    """
    ones, selector = (x[...] for x in constants)
    lanes = tpu_sums.valid_lanes(valid)
    decays, weights = (jnp.where(lanes, x[...], 0) for x in (log_decay, beta))
    sums = tpu_sums.Sums(selector, *tpu_sums.compute(decays, weights, ones, keys.dot.exact))
    kept.total[...] = sums.total
    pairs = _Pairs(keys, sums, kept)
    return [pairs.run(pair) for pair in range(len(decays))]


class _Pairs:
    def __init__(self, keys: Keys, sums: tpu_sums.Sums, kept: Kept) -> None:
        self._keys, self._sums, self._kept = keys, sums, kept
        self._shared: dict[tuple[int, ...], tuple[Array, Array]] = {}

    def run(self, pair: int) -> Steps:
        keys, dot, heads = self._keys, self._keys.dot, self._keys.of_pair(pair)
        for head in heads:
            keys.normalised(head)
        yield
        columns, scores = self._scores(heads)
        spread = self._sums.spread(pair)
        yield
        row, other, _ = tpu_inverse.tokens()
        decays = jnp.where(row >= other, jnp.exp2(self._sums.between(spread, pair)), 0)
        before = _of_each_head(jnp.exp2(spread[:, :LANES] + spread[:, LANES:]), keys.width)
        system = scores[:CHUNK] * decays
        self._kept.later[pair, :CHUNK] = (scores[CHUNK:] * decays).astype(dot.dtype)
        yield
        keys.keep_seeing(pair, [(before[h],) * 2 for h in range(2)], self._kept)
        later = columns.astype(jnp.float32) * self._sums.after[pair : pair + 1]
        self._kept.later[pair, CHUNK:] = later.astype(dot.dtype)
        yield
        solution = yield from tpu_inverse.inverse(system, dot)
        self._kept.solution[pair] = solution

    def _scores(self, heads: tuple[int, ...]) -> tuple[Float[Array, "dk L"], Float[Array, "2*C L"]]:
        """k of both heads as columns; what k and, below, q of each head have in common with its k's."""
        if heads not in self._shared:
            dot = self._keys.dot
            columns = jnp.concatenate([self._keys.normalised(head)[0].astype(dot.dtype) for head in heads]).T
            found = [dot(jnp.concatenate(self._keys.normalised(head)), columns) for head in dict.fromkeys(heads)]
            self._shared[heads] = columns, self._keys.side_by_side(found)
        return self._shared[heads]


def _of_each_head(x: Float[Array, "C L"], width: int) -> list[Float[Array, "C {width}"]]:
    """Of numbers that are equal in all of a head's lanes: one head's, and the other's, in all lanes."""
    _, _, head = tpu_inverse.tokens()
    turned = pltpu.roll(x, CHUNK, 1)
    both = jnp.where(head == 0, x, turned), jnp.where(head == 0, turned, x)
    return [jnp.concatenate([one] * (width // LANES), axis=1) for one in both]
