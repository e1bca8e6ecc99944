"""The maths of one chunk of tokens of the gated delta rule, on a TPU's registers and VMEM.

As in `xla.py`, for a chunk of C tokens that starts at state S: with kk[t, i] = k_t . d(i, t) k_i and qk likewise,

    u = (1 + beta kk)^-1 beta (v - before k S);  out = before q S + qk u;  S <- d S + (after k)^T u

What does not depend on S comes first, by `tpu_per_head.py` or `tpu_per_channel.py`, and waits in VMEM for the rest.

Two heads are worked on as one, so that the tokens i of both fill the lanes (head, i) of a register. Each step is taken
for all of them before the next one: a product's result comes long after it was asked for, and the others fill the time.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.tpu_grid import Grid
from pallas_kernels.gated_delta.tpu_inputs import Vectors
from pallas_kernels.gated_delta.tpu_inverse import block_diagonal
from pallas_kernels.tpu_sums import CHUNK, LANES
from pallas_kernels.tpu_vectors import Dot, normalised

# A piece of work that yields where it would wait.
Steps = Generator[None, None, None]


@dataclass(frozen=True)
class Kept:
    """References to what a chunk has before its states are known; all but the last are factors of products.

    solution [pairs, C, L]: the system's inverse, with beta if `later` has it not.
    seeing [heads, 2 C, dk]: k and, below, q, times the decay of the chunk up to each.
    later [pairs, C + dk, L]: what the outputs take from each u and, below, what the states do.
    total: the decay of the whole chunk, [pairs, L] or, per channel, [heads, dk].
    """

    solution: Any
    seeing: Any
    later: Any
    total: Any


def scratch(chunks: int, heads: int, key_dim: int, dtype: Any, per_channel: bool) -> list[Any]:
    """VMEM for the fields of `Kept`, in their order, of so many chunks."""
    pairs = (heads + 1) // 2
    return [
        pltpu.VMEM((chunks, pairs, CHUNK, LANES), dtype),
        pltpu.VMEM((chunks, heads, 2 * CHUNK, key_dim), dtype),
        pltpu.VMEM((chunks, pairs, CHUNK + key_dim, LANES), dtype),
        pltpu.VMEM((chunks, heads, key_dim) if per_channel else (chunks, pairs, LANES), jnp.float32),
    ]


class Keys:
    """k and q of a chunk's first `valid` tokens, for the value heads of a grid step."""

    def __init__(self, grid: Grid, vectors: Vectors, chunk: int, valid: Int[Array, ""]) -> None:
        self._vectors, self._chunk, self.width, self._valid = vectors, chunk, grid.key_dim, valid
        self._value_heads, self._groups = grid.size, grid.groups
        self._normalised: dict[int, tuple[Array, Array]] = {}
        self.dot = Dot(grid.dtype == jnp.float32)

    def of_pair(self, pair: int) -> tuple[int, int]:
        """The key heads of two value heads; of the last one twice where there is no other."""
        first, second = (min(2 * pair + i, self._value_heads - 1) // self._groups for i in range(2))
        return first, second

    def normalised(self, head: int) -> tuple[Float[Array, "C dk"], Float[Array, "C dk"]]:
        """k, 0 where not valid, and q."""
        if head not in self._normalised:
            valid = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0) < self._valid
            k = normalised(jnp.where(valid, self._vectors.k(self._chunk, head), 0))
            self._normalised[head] = k, normalised(self._vectors.q(self._chunk, head)) * self.width**-0.5
        return self._normalised[head]

    def side_by_side(self, found: list[Float[Array, "n L"]]) -> Float[Array, "n L"]:
        """Of what was found for one key head and another, or for the same, each one's lanes."""
        head = jax.lax.broadcasted_iota(jnp.int32, found[0].shape, 1) // CHUNK
        return found[0] if len(found) == 1 else jnp.where(head == 0, found[0], found[1])

    def keep_seeing(self, pair: int, before: list[tuple[Array, Array]], kept: Kept) -> None:
        """Writes `kept.seeing` of two heads, given what k and q of each are to be scaled by."""
        for i, head in enumerate(range(2 * pair, min(2 * pair + 2, self._value_heads))):
            scaled = [x * decay for x, decay in zip(self.normalised(self.of_pair(pair)[i]), before[i], strict=True)]
            kept.seeing[head] = jnp.concatenate(scaled).astype(self.dot.dtype)


def in_step(works: Sequence[Steps]) -> None:
    """Takes each step of all works, of as many steps each, before the next one."""
    while all([next(work, works) is not works for work in works]):
        pass


def apply(
    v: Callable[[int], Array], kept: Kept, S: Any, out: Any, keys: Keys, valid: Int[Array, ""], per_channel: bool
) -> None:
    """Writes outputs and next states of the first `valid` tokens, v of each head [C, dv]. References: out [C, hv dv];
    S [hv, dk, dv]."""
    heads, _, width = S.shape
    dot = keys.dot
    pairs = [range(first, min(first + 2, heads)) for first in range(0, heads, 2)]
    of_head = lambda head: slice(head * width, (head + 1) * width)  # noqa: E731
    row_valid = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0) < valid
    seen = [dot(kept.seeing[head], S[head]) for head in range(heads)]
    wanted = []
    for head in range(heads):
        value = jnp.where(row_valid, v(head), 0).astype(jnp.float32)
        wanted.append((value - seen[head][:CHUNK]).astype(dot.dtype))
    solved = []
    for number, pair in enumerate(pairs):
        both = [wanted[head] for head in pair] + [jnp.zeros_like(wanted[0])] * (2 - len(pair))
        solution = block_diagonal(kept.solution[number])
        solved.append(dot(solution, jnp.concatenate(both)).astype(dot.dtype))
    totals = kept.total[...].T if per_channel else kept.total[...]
    for number, pair in enumerate(pairs):
        nothing = jnp.zeros_like(solved[number][:CHUNK])
        for head in pair:
            own = [solved[number][i * CHUNK : (i + 1) * CHUNK] if i == head % 2 else nothing for i in range(2)]
            product = dot(kept.later[number], jnp.concatenate(own))
            out[:, of_head(head)] = (seen[head][CHUNK:] + product[:CHUNK]).astype(out.dtype)
            lane = head % 2 * CHUNK
            total = totals[:, head : head + 1] if per_channel else totals[number : number + 1, lane : lane + 1]
            S[head] = total * S[head] + product[CHUNK:]
