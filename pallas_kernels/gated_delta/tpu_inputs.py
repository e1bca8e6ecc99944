"""Where a prefill of the gated delta rule on TPU gets q, k and v from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.tpu_grid import Grid, State
from pallas_kernels.tpu_sums import CHUNK


class Vectors(Protocol):
    """In a grid step: q, k and v of a block of heads, and the states that belong to them besides the recurrent ones.

    Rows of tokens beyond the row's length may hold anything.
    """

    def start(self, states: Sequence[Any]) -> None:
        """At a row's first span, by references to its blocks."""

    def load(self) -> None:
        """At every span, before anything of it is read."""

    def q(self, chunk: int, key_head: int) -> Float[Array, "C dk"]:
        """Queries."""
        ...

    def k(self, chunk: int, key_head: int) -> Float[Array, "C dk"]:
        """Keys."""
        ...

    def v(self, chunk: int, value_head: int) -> Float[Array, "C dv"]:
        """Values."""
        ...

    def last(self, tokens: int | Int[Array, ""]) -> list[Array]:
        """The states after so many tokens of the span."""
        ...

    def advance(self) -> None:
        """After a span that is not the row's last."""


class Inputs(Protocol):
    """Of a call: where q, k and v come from. `name`: of the operator."""

    @property
    def name(self) -> str: ...

    @property
    def grid(self) -> Grid: ...

    @property
    def states(self) -> tuple[State, ...]: ...

    def operands(self) -> list[tuple[Any, pl.BlockSpec]]:
        """Arrays, and their blocks of a grid step."""
        ...

    def scratch(self) -> list[Any]:
        """Memory that stays from step to step."""
        ...

    def vectors(self, operands: Sequence[Any], scratch: Sequence[Any]) -> Vectors:
        """From references to both."""
        ...


@dataclass(frozen=True)
class Given:
    """q, k and v as they are, without further states."""

    q: Float[Array, "B T Hk dk"]
    k: Float[Array, "B T Hk dk"]
    v: Float[Array, "B T Hv dv"]
    name: str = "gated_delta"
    states: tuple[State, ...] = ()

    @property
    def grid(self) -> Grid:
        """The call's."""
        (batch, tokens, key_heads, key_dim), (value_heads, value_dim) = self.q.shape, self.v.shape[2:]
        return Grid(batch, tokens, key_heads, value_heads, key_dim, value_dim, self.q.dtype)

    def operands(self) -> list[tuple[Any, pl.BlockSpec]]:
        """As of `Inputs`."""
        grid = self.grid
        keys, values = grid.vectors(grid.size // grid.groups * grid.key_dim), grid.vectors(grid.size * grid.value_dim)
        return [(grid.flat(self.q), keys), (grid.flat(self.k), keys), (grid.flat(self.v), values)]

    def scratch(self) -> list[Any]:
        """As of `Inputs`."""
        return []

    def vectors(self, operands: Sequence[Any], scratch: Sequence[Any]) -> "_Blocks":
        """As of `Inputs`."""
        queries, keys, values = operands
        return _Blocks(queries, keys, values, self.q.shape[3], self.v.shape[3])


@dataclass(frozen=True)
class _Blocks:
    """`Vectors` from blocks [span, heads * width]."""

    queries: Any
    keys: Any
    values: Any
    key_dim: int
    value_dim: int

    def start(self, states: Sequence[Any]) -> None:
        pass

    def load(self) -> None:
        pass

    def q(self, chunk: int, key_head: int) -> Float[Array, "C dk"]:
        return _part(self.queries, chunk, key_head, self.key_dim)

    def k(self, chunk: int, key_head: int) -> Float[Array, "C dk"]:
        return _part(self.keys, chunk, key_head, self.key_dim)

    def v(self, chunk: int, value_head: int) -> Float[Array, "C dv"]:
        return _part(self.values, chunk, value_head, self.value_dim)

    def last(self, tokens: int | Int[Array, ""]) -> list[Array]:
        return []

    def advance(self) -> None:
        pass


def _part(block: Any, chunk: int, head: int, width: int) -> Float[Array, "C {width}"]:
    return block[chunk * CHUNK : (chunk + 1) * CHUNK, head * width : (head + 1) * width]
