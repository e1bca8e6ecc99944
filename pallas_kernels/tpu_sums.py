"""Sums of a chunk's log decays on TPU, for decays that a head has one of, two heads at a time.

s(t) - s(i) is as precise as a sum over just the tokens between, although it is a difference of long sums: each log
decay is a multiple of 1/4 and a rest. Sums of multiples of 1/4, and differences of such sums, are exact in float32;
those of the rests are small. Decays beyond 2^-160 a token are 0 in float32 anyway.

s(t) must also be spread along lanes. The permute unit would be the slowest of all for it; a product with a 0/1 matrix
does it too, exactly for numbers that are the sum of a few bfloat16 ones.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tpu_vectors import bfloat16_parts

CHUNK = 64
LANES = 128
_LOG2_E = 1.4426950408889634
# Log decays of a token, to the base 2, are cut here, and multiples of a quarter taken out of them.
_LEAST, _PARTS_OF_ONE = -160.0, 4.0


def parts(exact: bool) -> int:
    """bfloat16 numbers that s(t) is spread as: two of quarters, and those of the rest."""
    return 5 if exact else 4


def constants(pairs: int, lanes: int, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """0/1 matrices. `lanes`: of two heads' channels.

    The first sums over a head's tokens: up to each, and all of them, in each token's lane; all, in each channel's.
    The second takes (head, part, pair) to lanes (quarters or rest, head, token), and (quarters or rest, head, channel)
    if those differ.
    """
    head, token = np.divmod(np.arange(LANES)[:, None], CHUNK)
    other_head, other = np.divmod(np.arange(LANES), CHUNK)
    ones = np.concatenate(
        [(head == other_head) & (token <= other), head == other_head, head == np.arange(lanes) // (lanes // 2)], axis=1
    )
    head, part, _ = np.unravel_index(np.arange(2 * parts(exact) * pairs)[:, None], (2, parts(exact), pairs))
    selectors = []
    for width in (LANES,) if lanes == LANES else (LANES, lanes):
        rest, other_head, _ = np.unravel_index(np.arange(2 * width), (2, 2, width // 2))
        selectors.append((head == other_head) & ((part >= 2) == rest))
    return ones.astype(jnp.bfloat16), np.concatenate(selectors, axis=1).astype(jnp.bfloat16)


def scratch(pairs: int, lanes: int, exact: bool) -> list[Any]:
    """VMEM for the fields of `Sums`, in their order."""
    rows = pltpu.VMEM((pairs, LANES), jnp.float32)
    columns = pltpu.VMEM((CHUNK, 2 * parts(exact) * pairs), jnp.bfloat16)
    return [columns, rows, rows, rows, pltpu.VMEM((pairs, lanes), jnp.float32)]


@dataclass(frozen=True)
class Sums:
    """References, but for the selector.

    columns: parts of s(t), tokens along sublanes; quarters, rest: s(i), less the logarithm of its weight, along lanes.
    after: what is left at the chunk's end of what each token adds, times its weight.
    total: the decay of the whole chunk, along the lanes of two heads' channels.
    """

    selector: Float[Array, "K _"]
    columns: Any
    quarters: Any
    rest: Any
    after: Any
    total: Any

    def spread(self, pair: int) -> Float[Array, "CHUNK _"]:
        columns = self.columns[...]
        of_pair = jax.lax.broadcasted_iota(jnp.int32, columns.shape, 1) % len(self.after) == pair
        return jnp.dot(jnp.where(of_pair, columns, 0), self.selector, preferred_element_type=jnp.float32)

    def between(self, spread: Float[Array, "CHUNK _"], pair: int) -> Float[Array, "CHUNK LANES"]:
        """Of tokens i+1..t, and the logarithm of i's weight."""
        quarters, rest = spread[:, :LANES], spread[:, LANES : 2 * LANES]
        return (quarters - self.quarters[pair : pair + 1]) + (rest - self.rest[pair : pair + 1])

    def before(self, spread: Float[Array, "CHUNK _"]) -> Float[Array, "CHUNK lanes"]:
        """The decay up to each token."""
        lanes = self.total.shape[1]
        return jnp.exp2(spread[:, -2 * lanes : -lanes] + spread[:, -lanes:])


def by_pair(dt: Any, chunk: int | Int[Array, ""]) -> Float[Array, "pairs LANES"]:
    """One of two neighbouring chunks of a reference [heads, LANES], two heads side by side."""
    even, odd = (dt[pl.ds(head, dt.shape[0] // 2, stride=2)] for head in range(2))
    low = jax.lax.broadcasted_iota(jnp.int32, even.shape, 1) < CHUNK
    first = jnp.where(low, even, pltpu.roll(odd, CHUNK, 1))
    return jnp.where(chunk % 2 == 0, first, jnp.where(low, pltpu.roll(even, CHUNK, 1), odd))


def valid_lanes(left: Int[Array, ""]) -> Bool[Array, "1 LANES"]:
    """Whether a token, one of two heads', is among the first `left`."""
    return jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1) % CHUNK < left


def compute(
    log_decay: Float[Array, "pairs LANES"], weight: Float[Array, "pairs LANES"], ones: Array, exact: bool
) -> list[Array]:
    """The fields of `Sums`, of tokens' log decays and what scales the vectors that they add: both 0 if not valid."""
    log_decay = jnp.maximum(log_decay * _LOG2_E, _LEAST)
    quarters = jnp.round(log_decay * _PARTS_OF_ONE) / _PARTS_OF_ONE
    split = [*bfloat16_parts(quarters, 2), *bfloat16_parts(log_decay - quarters, 3)]
    summed = jnp.dot(jnp.concatenate(split).astype(jnp.bfloat16), ones, preferred_element_type=jnp.float32)
    parts_summed = jnp.split(summed, len(split))
    quarters, rest = parts_summed[0] + parts_summed[1], parts_summed[2] + parts_summed[3] + parts_summed[4]
    upto, upto_rest = quarters[:, :LANES], rest[:, :LANES]
    behind = (quarters[:, LANES : 2 * LANES] - upto) + (rest[:, LANES : 2 * LANES] - upto_rest)
    total = jnp.exp2(quarters[:, 2 * LANES :] + rest[:, 2 * LANES :])
    turned = jnp.concatenate([*bfloat16_parts(upto, 2), *bfloat16_parts(upto_rest, parts(exact) - 2)]).T
    columns = jnp.concatenate([turned[:CHUNK], turned[CHUNK:]], axis=1).astype(jnp.bfloat16)
    return [columns, upto, upto_rest - jnp.log(weight) * _LOG2_E, weight * jnp.exp2(behind), total]
