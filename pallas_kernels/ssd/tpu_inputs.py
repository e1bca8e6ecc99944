"""Where a prefill of Mamba-2 on TPU gets x, B and C from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.ssd.tpu_grid import Grid
from pallas_kernels.tpu_sums import CHUNK


class Vectors(Protocol):
    """In a grid step: x, and B and C as `writes` and `reads`, of a block of heads, and the states that belong to them
    besides the recurrent ones.

    Rows of tokens beyond the row's length are finite in x and B, and may hold anything in C.
    """

    def start(self) -> None:
        """At a row's first span."""

    def load(self, left: Int[Array, ""]) -> None:
        """At every span, of which so many tokens are valid, before anything of it is read."""

    def x(self, chunk: int, pair: int) -> Float[Array, "CHUNK 2P"]:
        """Inputs of two heads."""
        ...

    def writes(self, chunk: int, group: int) -> Float[Array, "CHUNK N"]:
        """What a group of the block writes with."""
        ...

    def reads(self, chunk: int, group: int) -> Float[Array, "CHUNK N"]:
        """What a group of the block reads with."""
        ...

    def keep(self, tokens: Int[Array, ""], slots: Sequence[Any]) -> None:
        """Copies the states after so many tokens of the span into these slots."""

    def advance(self) -> None:
        """After a span that is not the row's last."""


class Inputs(Protocol):
    """Of a call: where x, B and C come from. `name`: of the operator; `states`: with their blocks of a grid step."""

    @property
    def name(self) -> str: ...

    @property
    def grid(self) -> Grid: ...

    @property
    def states(self) -> list[tuple[Array, pl.BlockSpec]]: ...

    def operands(self) -> list[tuple[Any, pl.BlockSpec]]:
        """Arrays, and their blocks of a grid step."""
        ...

    def scratch(self) -> list[Any]:
        """Memory that stays from step to step."""
        ...

    def vectors(self, operands: Sequence[Any], states: Sequence[Any], scratch: Sequence[Any]) -> Vectors:
        """From references to them."""
        ...


def valid_rows(x: Float[Array, "T _"], left: Int[Array, ""]) -> Float[Array, "T _"]:
    """With rows from `left` on set to 0, whatever they held: in words of 32 bits, which have one or two rows each."""
    words = pltpu.bitcast(x, jnp.int32)
    rows = len(x) // len(words)
    row = jax.lax.broadcasted_iota(jnp.int32, words.shape, 0) * rows
    if rows == 1:
        return jnp.where(row < left, x, 0)
    valid = jnp.where(row + 1 < left, -1, jnp.where(row < left, 0xFFFF, 0))
    return pltpu.bitcast(words & valid, x.dtype)


@dataclass(frozen=True)
class Given:
    """x, B and C as they are, without further states."""

    x: Float[Array, "B T H P"]
    B: Float[Array, "B T G N"]
    C: Float[Array, "B T G N"]
    name: str = "ssd"

    @property
    def grid(self) -> Grid:
        """The call's."""
        (batch, tokens, heads, head_dim), (groups, width) = self.x.shape, self.B.shape[2:]
        return Grid(batch, tokens, heads, groups, head_dim, width, self.x.dtype)

    @property
    def states(self) -> list[tuple[Array, pl.BlockSpec]]:
        """None."""
        return []

    def operands(self) -> list[tuple[Any, pl.BlockSpec]]:
        """As of `Inputs`."""
        grid = self.grid
        groups = [(grid.flat(v), grid.of_groups()) for v in (self.B, self.C)]
        return [(grid.flat(self.x), grid.of_heads()), *groups]

    def scratch(self) -> list[Any]:
        """As of `Inputs`."""
        return []

    def vectors(self, operands: Sequence[Any], states: Sequence[Any], scratch: Sequence[Any]) -> "_Blocks":
        """As of `Inputs`."""
        return _Blocks(self.grid, *operands)


@dataclass
class _Blocks:
    """`Vectors` from blocks [span, heads P] and [span, groups N]."""

    grid: Grid
    x_block: Any
    B_block: Any
    C_block: Any

    def start(self) -> None:
        pass

    def load(self, left: Int[Array, ""]) -> None:
        self._left = left

    def x(self, chunk: int, pair: int) -> Float[Array, "CHUNK 2P"]:
        return valid_rows(self._part(self.x_block, chunk, pair, 2 * self.grid.head_dim), self._left - chunk * CHUNK)

    def writes(self, chunk: int, group: int) -> Float[Array, "CHUNK N"]:
        return valid_rows(self._part(self.B_block, chunk, group, self.grid.state_size), self._left - chunk * CHUNK)

    def reads(self, chunk: int, group: int) -> Float[Array, "CHUNK N"]:
        return self._part(self.C_block, chunk, group, self.grid.state_size)

    def keep(self, tokens: Int[Array, ""], slots: Sequence[Any]) -> None:
        pass

    def advance(self) -> None:
        pass

    def _part(self, block: Any, chunk: int, number: int, width: int) -> Float[Array, "CHUNK {width}"]:
        return block[chunk * CHUNK : (chunk + 1) * CHUNK, number * width : (number + 1) * width]
