"""The maths of chunks of tokens of Mamba-2, on a TPU's registers and VMEM.

As in `xla.py`, two heads of a group at a time, so that tokens i of both fill the lanes (head, i) of a register. For a
chunk of 64 tokens that starts at state h, with d(i, t) the decay from token i to token t,

    y = d(0, t) C h + M x,  M[t, i] = d(i, t) dt_i (C_t . B_i) for i <= t;  M[t, t] has D besides
    h <- d(0, last) h + sum_i d(i, last) dt_i B_i x_i

The steps of several pairs overlap: a product's result comes long after it was asked for.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.ssd.tpu_decays import Decays
from pallas_kernels.ssd.tpu_grid import Grid
from pallas_kernels.ssd.tpu_inputs import Vectors
from pallas_kernels.tpu_sums import CHUNK, LANES
from pallas_kernels.tpu_vectors import Dot

# Pairs of heads whose steps are taken together.
_TOGETHER = 4


@dataclass(frozen=True)
class Span:
    """Of a grid step: references to h [pairs, N, 2 P], D's matrices [pairs, CHUNK, LANES] and out [span, heads P]."""

    grid: Grid
    vectors: Vectors
    decays: list[Decays]
    D: Any
    h: Any
    out: Any


@dataclass(frozen=True)
class _Group:
    """What the heads of a group share: C; C . B up to each token, for two heads; B's columns, for two heads."""

    C: Float[Array, "CHUNK N"]
    scores: Float[Array, "CHUNK LANES"]
    columns: Float[Array, "N LANES"]


def diagonal(D: Float[Array, "1 LANES"]) -> Float[Array, "CHUNK LANES"]:
    """Two heads' D where their tokens are the same."""
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), axis) for axis in (0, 1))
    return jnp.where(row == lane % CHUNK, D, 0)


def run(span: Span) -> None:
    """Writes the outputs and next states."""
    grid = span.grid
    per_group = grid.pairs // grid.own_groups
    batches = [
        (chunk, group, range(first, min(first + _TOGETHER, (group + 1) * per_group)))
        for chunk in range(len(span.decays))
        for group in range(grid.own_groups)
        for first in range(group * per_group, (group + 1) * per_group, _TOGETHER)
    ]
    steps = _Steps(span)
    asked: dict[int, list[Any]] = {}
    # A batch is asked for while its neighbour is multiplied and finished.
    for number in range(-1, len(batches)):
        if number + 1 < len(batches):
            asked[number + 1] = steps.ask(*batches[number + 1])
        if number >= 0:
            steps.finish(*batches[number], steps.multiply(*batches[number], asked.pop(number)))


class _Steps:
    """The steps of a batch of pairs, of one group."""

    def __init__(self, span: Span) -> None:
        self._span, self._dot = span, Dot(span.grid.dtype == jnp.float32)
        self._groups: dict[tuple[int, int], _Group] = {}

    def _group(self, chunk: int, group: int) -> _Group:
        if (chunk, group) not in self._groups:
            c, b = self._span.vectors.reads(chunk, group), self._span.vectors.writes(chunk, group)
            both = jnp.concatenate([b, b])
            row, lane = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), axis) for axis in (0, 1))
            scores = jnp.where(row >= lane % CHUNK, self._dot(c, both, (1, 1)), 0)
            self._groups[chunk, group] = _Group(c, scores, both.astype(jnp.float32).T)
        return self._groups[chunk, group]

    def ask(self, chunk: int, group: int, pairs: range) -> list[tuple[Array, Array]]:
        """M, and the decays up to each token."""
        decays, scores = self._span.decays[chunk], self._group(chunk, group).scores
        found = []
        for pair, (between, before) in zip(pairs, decays.between(pairs), strict=True):
            M = between * (scores * decays.weight[pair : pair + 1]) + self._span.D[pair]
            found.append((M.astype(self._dot.dtype), before))
        return found

    def multiply(
        self, chunk: int, group: int, pairs: range, asked: list[tuple[Array, Array]]
    ) -> list[tuple[Array, Array]]:
        """What the outputs have from before the chunk; what the chunk adds to them and, below, to the state."""
        shared, found = self._group(chunk, group), []
        states = jnp.concatenate([self._span.h[pair].astype(self._dot.dtype) for pair in pairs], axis=1)
        seen = jnp.split(self._dot(shared.C, states), len(pairs), axis=1)
        for pair, (M, before), read in zip(pairs, asked, seen, strict=True):
            added = (shared.columns * self._span.decays[chunk].after[pair : pair + 1]).astype(self._dot.dtype)
            product = self._dot(jnp.concatenate([M, added]), _of_each_head(self._span.vectors.x(chunk, pair)))
            found.append((before * read, product))
        return found

    def finish(self, chunk: int, group: int, pairs: range, multiplied: list[tuple[Array, Array]]) -> None:
        """Writes outputs and states."""
        out, h, lanes = self._span.out, self._span.h, 2 * self._span.grid.head_dim
        rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        for pair, (before, product) in zip(pairs, multiplied, strict=True):
            out[rows, pair * lanes : (pair + 1) * lanes] = (before + product[:CHUNK]).astype(out.dtype)
            h[pair] = self._span.decays[chunk].total[pair : pair + 1] * h[pair] + product[CHUNK:]


def _of_each_head(x: Float[Array, "CHUNK lanes"]) -> Float[Array, "2*CHUNK lanes"]:
    """The first head's channels alone and, below, the second's: in words of 32 bits, whatever their type."""
    words = pltpu.bitcast(x, jnp.int32)
    second = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1) >= words.shape[1] // 2
    return jnp.concatenate([pltpu.bitcast(jnp.where(second == bool(head), words, 0), x.dtype) for head in range(2)])
