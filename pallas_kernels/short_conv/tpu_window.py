"""Inputs of a causal convolution on TPU: a block of tokens behind those that came before it, in VMEM.

A window is [C/128, 8 + T, 128]. With no more than a register's lanes in a row, a load may begin at any row, so each tap
is a load at its own row. In wider rows it would be two loads, rotated and joined by the vector unit, which is
what limits a convolution.

Rows of padding need no mask here: an output depends on no later input. What takes outputs of padding has to mask them.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu_sums import LANES

# Rows of a tile: a block's tokens begin there, so that they are stored as whole tiles.
TILE = 8


def refusal(taps: int) -> str | None:
    """Why a window cannot hold what so many taps need before a block, or None."""
    return None if 2 <= taps <= TILE + 1 else f"{taps} taps are not 2 to {TILE + 1}"


def scratch(tokens: int, channels: int) -> Any:
    """VMEM for a window."""
    return pltpu.VMEM((channels // LANES, TILE + tokens, LANES), jnp.float32)


@dataclass(frozen=True)
class Window:
    """A window's reference, and how many tokens before the block it keeps: K-1."""

    inputs: Any
    past: int

    def start(self, state: Float[Array, "K-1 C"]) -> None:
        """The tokens before a row's first block."""
        for number in range(len(self.inputs)):
            self.inputs[number, TILE - self.past : TILE] = state[:, _lanes(number)].astype(jnp.float32)

    def put(self, number: int, x: Float[Array, "T 128"]) -> None:
        """A block's inputs, of the given 128 channels."""
        self.inputs[number, TILE:] = x.astype(jnp.float32)

    def last(self, tokens: int | Int[Array, ""]) -> Float[Array, "K-1 C"]:
        """The last inputs up to so many tokens of the block: none of the block's own where there are 0."""
        first = TILE - self.past + tokens
        rows = [self.inputs[number, pl.ds(first, self.past)] for number in range(len(self.inputs))]
        return jnp.concatenate(rows, axis=1)

    def advance(self) -> None:
        """Makes the end of a block, which was full, the past of the next one."""
        for number in range(len(self.inputs)):
            tokens = self.inputs.shape[1] - TILE
            self.inputs[number, TILE - self.past : TILE] = self.inputs[number, TILE + tokens - self.past :]

    def activations(
        self, number: int, filters: Any, dtype: Any, first: int = 0, tokens: int | None = None
    ) -> Float[Array, "T 128"]:
        """`silu_of_sum`, for the given 128 channels; of all tokens or of some."""
        size = self.inputs.shape[1] - TILE if tokens is None else tokens
        start, own = TILE - self.past + first, _lanes(number)
        rows = [self.inputs[number, start + tap : start + tap + size] for tap in range(self.past + 1)]
        return silu_of_sum(rows, filters[:, own], dtype)

    def wide_activations(
        self, channel: int, width: int, filters: Any, dtype: Any, first: int, tokens: int
    ) -> Float[Array, "T {width}"]:
        """`activations` of so many channels from the given one on, multiples of 128."""
        numbers = range(channel // LANES, (channel + width) // LANES)
        parts = [self.activations(number, filters, dtype, first, tokens) for number in numbers]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def filters_of(weight: Float[Array, "C K"], bias: Float[Array, " C"] | None, dtype: Any) -> Float[Array, "_ C"]:
    """The taps and, below, the bias if there is one, as `silu_of_sum` takes them for results of this dtype."""
    rows = (weight.T if bias is None else jnp.concatenate([weight.T, bias[None]])).astype(jnp.float32)
    return rows if dtype == jnp.float32 else 0.5 * rows


def silu_of_sum(inputs: Sequence[Float[Array, "T C"]], filters: Float[Array, "_ C"], dtype: Any) -> Float[Array, "T C"]:
    """silu(bias + sum of taps times inputs), the filters as of `filters_of`, in the dtype.

    Where that is bfloat16, the error of the float32 arithmetic is that of x / 2 rather than of the result.
    """
    bias = filters[len(inputs) :]
    terms = [x * filters[tap : tap + 1] for tap, x in enumerate(inputs)] + [bias] * len(bias)
    total = functools.reduce(operator.add, terms)
    if dtype == jnp.float32:
        return total * jax.nn.sigmoid(total)
    # tanh is one operation where 1 / (1 + exp) takes ten; it wants half of the sum, which the filters give.
    return (total + total * jnp.tanh(total)).astype(dtype)


def _lanes(number: int) -> slice:
    return slice(number * LANES, (number + 1) * LANES)
