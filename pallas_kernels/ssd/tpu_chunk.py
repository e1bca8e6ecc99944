"""The maths of one chunk of tokens of Mamba-2, on a TPU's registers and VMEM.

As in `xla.py`, two heads of a group at a time, so that tokens i of both fill the lanes (head, i) of a register. For a
chunk of 64 tokens that starts at state h, with s(t) the sum of the tokens' log decays up to t,

    y = exp(s(t)) C h + M x,  M[t, i] = exp(s(t) - s(i)) dt_i (C_t . B_i) for i <= t;  M[t, t] has D besides
    h <- exp(s(last)) h + sum_i exp(s(last) - s(i)) dt_i B_i x_i

The steps of several pairs overlap: a product's result comes long after it was asked for.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu_sums import CHUNK, LANES, Sums
from pallas_kernels.tpu_vectors import Dot

# Finite beyond the diagonal, where C . B is masked to 0.
_MOST = 100.0
# Pairs of heads whose steps are taken together.
_TOGETHER = 4


@dataclass(frozen=True)
class Block:
    """References of a grid step: x, out [CHUNK, heads P]; B, C [CHUNK, groups N]; D [pairs, LANES]; h [pairs, N, 2 P];
    and the tokens of the chunk that are valid."""

    x: Any
    B: Any
    C: Any
    D: Any
    h: Any
    out: Any
    left: Int[Array, ""]


def chunk(block: Block, sums: Sums) -> None:
    """Writes the outputs and next states."""
    pairs, width, _ = block.h.shape
    exact = block.x.dtype == jnp.float32
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), axis) for axis in (0, 1))
    tokens = _Tokens(block, sums, row == lane % CHUNK, Dot(exact))
    valid = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0) < block.left
    groups: list[_Group] = []
    for first in range(0, block.B.shape[1], width):
        c, b = block.C[:, first : first + width], block.B[:, first : first + width]
        b = jnp.where(valid, b.astype(jnp.float32), 0)
        both = jnp.concatenate([b, b])
        scores = jnp.where(row >= lane % CHUNK, tokens.dot(c, both, (1, 1)), 0)
        groups.append(_Group(c, scores, both.T))
    per_group = pairs // len(groups)
    batches = [range(pair, min(pair + _TOGETHER, pairs)) for pair in range(0, pairs, _TOGETHER)]
    asked: dict[int, list[tuple[Array, Array]]] = {}
    multiplied: dict[int, list[tuple[Array, Array]]] = {}
    # A batch is asked for, multiplied and finished one round after the other, while its neighbours are, too.
    for number in range(-1, len(batches) + 1):
        if number + 1 < len(batches):
            asked[number + 1] = [tokens.ask(pair, groups[pair // per_group]) for pair in batches[number + 1]]
        if 0 <= number < len(batches):
            pairs_asked = zip(batches[number], asked.pop(number), strict=True)
            multiplied[number] = [tokens.multiply(pair, groups[pair // per_group], got) for pair, got in pairs_asked]
        if number >= 1:
            for pair, got in zip(batches[number - 1], multiplied.pop(number - 1), strict=True):
                tokens.finish(pair, got)


@dataclass(frozen=True)
class _Group:
    """What the heads of a group share: C; C . B up to each token, for two heads; B's columns, for two heads."""

    C: Float[Array, "CHUNK N"]
    scores: Float[Array, "CHUNK LANES"]
    columns: Float[Array, "N LANES"]


class _Tokens:
    """The steps of a pair of heads."""

    def __init__(self, block: Block, sums: Sums, diagonal: Any, dot: Dot) -> None:
        self._block, self._sums, self._diagonal, self.dot = block, sums, diagonal, dot
        lanes = block.h.shape[2]
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, lanes), axis) for axis in (0, 1))
        self._masks = [(row < block.left) & (lane // (lanes // 2) == head) for head in range(2)]

    def ask(self, pair: int, group: _Group) -> tuple[Array, Array]:
        """The sums of decays, and what C reads of the state that the chunk starts at."""
        return self._sums.spread(pair), self.dot(group.C, self._block.h[pair])

    def multiply(self, pair: int, group: _Group, asked: tuple[Array, Array]) -> tuple[Array, Array]:
        """What the outputs have from before the chunk; what the chunk adds to them and, below, to the state."""
        (spread, seen), lanes = asked, self._block.h.shape[2]
        M = jnp.exp2(jnp.minimum(self._sums.between(spread, pair), _MOST)) * group.scores
        M = M + jnp.where(self._diagonal, self._block.D[pair : pair + 1], 0)
        added = group.columns * self._sums.after[pair : pair + 1]
        x = self._block.x[:, pair * lanes : (pair + 1) * lanes]
        of_each_head = jnp.concatenate([jnp.where(mask, x, 0) for mask in self._masks])
        return self._sums.before(spread) * seen, self.dot(jnp.concatenate([M, added]), of_each_head)

    def finish(self, pair: int, multiplied: tuple[Array, Array]) -> None:
        """Writes outputs and state."""
        (before, product), h, lanes = multiplied, self._block.h, self._block.h.shape[2]
        self._block.out[:, pair * lanes : (pair + 1) * lanes] = before + product[:CHUNK]
        h[pair] = self._sums.total[pair : pair + 1] * h[pair] + product[CHUNK:]
