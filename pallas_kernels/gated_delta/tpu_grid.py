"""The grid of a prefill of the gated delta rule on TPU: rows x blocks of value heads x spans of one or two chunks."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.gated_delta.tpu_decode import heads_per_block
from pallas_kernels.tpu_sums import CHUNK

# Chunks that are prepared together: what waits in one of them is hidden by the others.
MOST_CHUNKS = 2


def tokens_per_step(tokens: int) -> int:
    """Of a grid step, in a call of so many tokens."""
    return min(MOST_CHUNKS, -(-tokens // CHUNK)) * CHUNK


@dataclass(frozen=True)
class Grid:
    """What a call's shapes make of it. `dtype` is that of q, k and v."""

    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    dtype: Any

    @property
    def groups(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def size(self) -> int:
        """Value heads of a step. Float32 inputs' blocks and products take twice the room."""
        state_bytes = self.key_dim * self.value_dim * 2 * jnp.dtype(self.dtype).itemsize
        return heads_per_block(self.value_heads, self.groups, state_bytes)

    @property
    def blocks(self) -> int:
        """Of value heads."""
        return self.value_heads // self.size

    @property
    def span(self) -> int:
        """Tokens of a step."""
        return tokens_per_step(self.tokens)

    @property
    def steps(self) -> tuple[int, int, int]:
        """Rows, blocks, spans."""
        return self.batch, self.blocks, pl.cdiv(self.tokens, self.span)

    @property
    def padded_tokens(self) -> int:
        """A last span that is not full reaches beyond the arrays; only a block must not be larger than its array."""
        return max(self.tokens, self.span)

    def vectors(self, width: int, first: int = 0) -> pl.BlockSpec:
        """Of [B, T, _], a span's tokens and a block's heads, side by side: [span, width]. `first`: of all blocks."""
        return pl.BlockSpec(
            (None, self.span, width),
            lambda row, block, number, layer, read, write, lengths, *_: (
                row, self.current(number, lengths, row), first + block
            ),
        )  # fmt: skip

    def current(self, span_number: Any, lengths: Any, row: Any) -> Any:
        """The span, or the row's last one."""
        return jnp.minimum(span_number, jax.lax.div(jnp.maximum(lengths[row] - 1, 0), self.span))

    def flat(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T _"]:
        """For `vectors`."""
        return self.padded(x.reshape(self.batch, self.tokens, -1), self.padded_tokens)

    def padded(self, x: Float[Array, "B T ..."], tokens: int) -> Float[Array, "B {tokens} ..."]:
        """With so many tokens."""
        return jnp.pad(x, [(0, 0), (0, tokens - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


@dataclass(frozen=True)
class State:
    """A state [L, N, ...] that a row reads from its slot and writes to another: a block of heads is `block`, as many
    of its numbers along `axis` as there are blocks."""

    array: Float[Array, "L N ..."]
    block: tuple[int, ...]
    axis: int

    def spec(self, which: int) -> pl.BlockSpec:
        """Of the blocks, by the read (0) or write (1) slots."""

        def index(row: Any, block: Any, number: Any, layer: Any, *slots: Any) -> tuple[Any, ...]:
            place = (block if axis == self.axis else 0 for axis in range(len(self.block)))
            return layer[0], slots[which][row], *place

        return pl.BlockSpec((None, None, *self.block), index)

    def block_of(self, slot: Any, number: Any) -> Any:
        """Of a reference to a slot."""
        size = self.block[self.axis]
        return slot.at[*[slice(None)] * self.axis, pl.ds(pl.multiple_of(number * size, size), size)]
