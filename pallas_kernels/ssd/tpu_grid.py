"""The grid of a prefill of Mamba-2 on TPU: rows x blocks of heads x spans of one or two chunks of tokens."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.ssd.tpu_decode import groups_of_block
from pallas_kernels.tpu_sums import CHUNK, LANES

# States of one grid step, in and out, are in VMEM twice each, and once more to be computed on.
BLOCK_BYTES = 1 << 20
# Chunks of a grid step: what waits in one of them is hidden by the other, and a step's own control comes half as often.
MOST_CHUNKS = 2


@dataclass(frozen=True)
class Grid:
    """What a call's shapes make of it. `dtype` is that of x, B and C."""

    batch: int
    tokens: int
    heads: int
    groups: int
    head_dim: int
    state_size: int
    dtype: Any

    @property
    def size(self) -> int:
        """Heads of a step: an even number, whole groups or a part of one, as many as fit into `BLOCK_BYTES`.

        Float32 inputs' blocks and products take twice the room.
        """
        group, itemsize = self.heads // self.groups, jnp.dtype(self.dtype).itemsize
        fitting = [
            n for n in range(2, self.heads + 1, 2)
            if self.heads % n == 0 and (n % group == 0 or group % n == 0)
            and n * self.head_dim * self.state_size * 2 * itemsize <= BLOCK_BYTES
        ]  # fmt: skip
        return max(fitting, default=self.heads)

    @property
    def blocks(self) -> int:
        """Of heads."""
        return self.heads // self.size

    @property
    def pairs(self) -> int:
        """Of heads, in a step."""
        return self.size // 2

    @property
    def own_groups(self) -> int:
        """Groups of a block."""
        return groups_of_block(self.size, self.heads, self.groups)[0]

    @property
    def sharing(self) -> int:
        """Blocks that share a group."""
        return groups_of_block(self.size, self.heads, self.groups)[1]

    @property
    def channels(self) -> int:
        """Of x, in a step."""
        return self.size * self.head_dim

    @property
    def shared(self) -> int:
        """Numbers of B, and of C, in a step."""
        return self.own_groups * self.state_size

    @property
    def span(self) -> int:
        """Tokens of a step."""
        return min(MOST_CHUNKS, -(-self.tokens // CHUNK)) * CHUNK

    @property
    def steps(self) -> tuple[int, int, int]:
        """Rows, blocks, spans."""
        return self.batch, self.blocks, pl.cdiv(self.tokens, self.span)

    @property
    def padded_tokens(self) -> int:
        """A last span that is not full reaches beyond the arrays; only a block must not be larger than its array."""
        return max(self.tokens, self.span)

    def of_heads(self) -> pl.BlockSpec:
        """Of [B, T, heads P], a step's: [span, channels]."""
        return pl.BlockSpec(
            (None, self.span, self.channels),
            lambda row, block, span, layer, read, write, lengths, *_: (row, self.current(span, lengths, row), block),
        )

    def of_groups(self, first: int = 0) -> pl.BlockSpec:
        """Of [B, T, _], the numbers of a step's groups: [span, shared], starting at the `first` of so many such."""
        return pl.BlockSpec(
            (None, self.span, self.shared),
            lambda row, block, span, layer, read, write, lengths, *_: (
                row, self.current(span, lengths, row), first + block // self.sharing
            ),
        )  # fmt: skip

    def of_tokens(self) -> pl.BlockSpec:
        """Of what `along_tokens` gives, a step's heads, and its tokens in a register's lanes: [size, LANES]."""
        return pl.BlockSpec(
            (None, self.size, LANES),
            lambda row, block, span, layer, read, write, lengths, *_: (row, block, self.current(span, lengths, row)),
        )

    def along_tokens(self, x: Float[Array, "B T H"]) -> Float[Array, "B H T"]:
        """In float32, tokens last, of whole registers."""
        return self.padded(x.astype(jnp.float32), self.steps[2] * LANES).swapaxes(1, 2)

    def current(self, span: Any, lengths: Any, row: Any) -> Any:
        """The span, or the row's last one."""
        return jnp.minimum(span, jax.lax.div(jnp.maximum(lengths[row] - 1, 0), self.span))

    def flat(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T _"]:
        """For `of_heads` and `of_groups`."""
        return self.padded(x.reshape(self.batch, self.tokens, -1), self.padded_tokens)

    def padded(self, x: Float[Array, "B T _"], tokens: int) -> Float[Array, "B {tokens} _"]:
        """With so many tokens."""
        return jnp.pad(x, [(0, 0), (0, tokens - x.shape[1]), (0, 0)])
