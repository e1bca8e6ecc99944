"""Short convolutions, SiLU and Mamba-2's recurrence of many tokens on TPU, in one pass over memory.

The kernel is that of `ssd/tpu_prefill.py`. What it takes for x, B and C are the convolutions' inputs: a window in VMEM
holds a span's behind the last K-1 of the span before, and a pair of heads' x is convolved where it is used, a group's B
and C once for all its heads in the step.

Activations are rounded to the inputs' dtype, as `short_conv` returns them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.short_conv import tpu_window
from pallas_kernels.short_conv.tpu_window import Window
from pallas_kernels.ssd import tpu_prefill
from pallas_kernels.ssd.tpu import accepts_chunks
from pallas_kernels.ssd.tpu_grid import Grid
from pallas_kernels.ssd.tpu_inputs import valid_rows
from pallas_kernels.tpu_sums import CHUNK, LANES


def accepts(
    inputs: tuple[Array, Array], filters: tuple[Array, ...], biases: Any, conv_states: Any, dt: Array, A: Array,
    D: Array, state: Array, *_: Any, **__: Any,
) -> str | None:  # fmt: skip
    """Why the kernel cannot run these arguments of `conv_ssd`, or None."""
    heads, head_dim, width = state.shape[2:]
    return tpu_window.refusal(filters[0].shape[1]) or accepts_chunks(
        heads, head_dim, inputs[1].shape[2] // (2 * width), width
    )


def conv_ssd(
    inputs: tuple[Float[Array, "B T H*P"], Float[Array, "B T 2*G*N"]],
    filters: tuple[Float[Array, "_ K"], ...],
    biases: tuple[Float[Array, " _"], ...] | None,
    conv_states: tuple[Float[Array, "L S K-1 _"], ...],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H P"], tuple[Float[Array, "L S K-1 _"], ...], Float[Array, "L S H P N"]]:
    """Arguments and result as in `pallas_kernels.conv_ssd.conv_ssd`; `interpret` as of `pallas_call`."""
    checkpoints = None
    if checkpoint_lengths is not None and checkpoint_slots is not None:
        checkpoints = checkpoint_lengths, checkpoint_slots
    out, (state, *conv) = tpu_prefill.prefill(
        _Convolved(inputs, filters, biases, conv_states, state),
        *(dt, A, D, state, layer, read_slots, write_slots, lengths, checkpoints),
        out_dtype=inputs[0].dtype,
        interpret=interpret,
    )
    return out, tuple(conv), state


@dataclass(frozen=True)
class _Convolved:
    """`Inputs` of `ssd/tpu_inputs.py`; `recurrent` for its widths."""

    inputs: tuple[Float[Array, "B T H*P"], Float[Array, "B T 2*G*N"]]
    filters: tuple[Float[Array, "_ K"], ...]
    biases: tuple[Float[Array, " _"], ...] | None
    conv_states: tuple[Float[Array, "L S K-1 _"], ...]
    recurrent: Float[Array, "L S H P N"]
    name: str = "conv_ssd"

    @property
    def grid(self) -> Grid:
        """The call's."""
        (batch, tokens), (heads, head_dim, width) = self.inputs[0].shape[:2], self.recurrent.shape[2:]
        groups = self.inputs[1].shape[2] // (2 * width)
        return Grid(batch, tokens, heads, groups, head_dim, width, self.inputs[0].dtype)

    @property
    def states(self) -> list[tuple[Array, pl.BlockSpec]]:
        """The inputs before a row's first, of a block's heads, and of B and C of all groups."""
        past, (x, bc) = self.filters[0].shape[1] - 1, self.conv_states
        own = pl.BlockSpec(
            (None, None, past, self.grid.channels), lambda row, block, span, layer, read, *_: (
                layer[0], read[row], 0, block
            ),
        )  # fmt: skip
        every = pl.BlockSpec(
            (None, None, past, bc.shape[3]), lambda row, block, span, layer, read, *_: (layer[0], read[row], 0, 0)
        )
        return [(x, own), (bc, every)]

    def operands(self) -> list[tuple[Any, pl.BlockSpec]]:
        """Inputs, and the filters of a block's x, B and C, side by side."""
        grid, (x, bc) = self.grid, (self.grid.flat(v) for v in self.inputs)
        x_bias, bc_bias = self.biases or (None, None)
        by_block = tpu_window.filters_of(self.filters[0], x_bias, grid.dtype)
        by_block = by_block.reshape(-1, grid.blocks, grid.channels)
        shared = tpu_window.filters_of(self.filters[1], bc_bias, grid.dtype)
        shared = shared.reshape(len(shared), 2, grid.blocks // grid.sharing, grid.shared)
        shared = jnp.repeat(shared, grid.sharing, axis=2)
        filters = jnp.concatenate([by_block, shared[:, 0], shared[:, 1]], axis=2).swapaxes(0, 1)
        return [
            (x, grid.of_heads()),
            (bc, grid.of_groups()),
            (bc, grid.of_groups(grid.blocks // grid.sharing)),
            (filters, pl.BlockSpec((None, *filters.shape[1:]), lambda row, block, *_: (block, 0, 0))),
        ]

    def scratch(self) -> list[Any]:
        """The window; states on their way out, and semaphores."""
        grid, past = self.grid, self.filters[0].shape[1] - 1
        widths, dtypes = (grid.channels, 2 * grid.shared), (x.dtype for x in self.conv_states)
        leaving = (pltpu.VMEM((past, width), dtype) for width, dtype in zip(widths, dtypes, strict=True))
        return [tpu_window.scratch(grid.span, sum(widths)), *leaving, pltpu.SemaphoreType.DMA((3,))]

    def vectors(self, operands: Sequence[Any], states: Sequence[Any], scratch: Sequence[Any]) -> "_Window":
        """From references to them."""
        *inputs, filters = operands
        window, *leaving, semaphores = scratch
        window = Window(window, self.filters[0].shape[1] - 1)
        return _Window(self.grid, inputs, filters, states, window, leaving, semaphores)


@dataclass(frozen=True)
class _Window:
    """`Vectors` of `ssd/tpu_inputs.py`, by references to blocks [span, heads P], and [span, groups N] of B and of C."""

    grid: Grid
    inputs: list[Any]
    filters: Any
    states: Sequence[Any]
    window: Window
    leaving: list[Any]
    semaphores: Any

    def start(self) -> None:
        x, bc = self.states
        parts = [bc[:, lanes] for lanes in self._shared(bc.shape[1])]
        self.window.start(jnp.concatenate([x[...], *parts], axis=1))

    def load(self, left: Int[Array, ""]) -> None:
        number = 0
        for block in self.inputs:
            for first in range(0, block.shape[1], LANES):
                self.window.put(number, valid_rows(block[:, first : first + LANES], left))
                number += 1

    def x(self, chunk: int, pair: int) -> Float[Array, "CHUNK 2P"]:
        width = 2 * self.grid.head_dim
        return self._activations(chunk, pair * width, width)

    def writes(self, chunk: int, group: int) -> Float[Array, "CHUNK N"]:
        width = self.grid.state_size
        return self._activations(chunk, self.grid.channels + group * width, width)

    def reads(self, chunk: int, group: int) -> Float[Array, "CHUNK N"]:
        width = self.grid.state_size
        return self._activations(chunk, self.grid.channels + self.grid.shared + group * width, width)

    def keep(self, tokens: Int[Array, ""], slots: Sequence[Any]) -> None:
        grid, inputs, (own, shared) = self.grid, self.window.last(tokens), self.leaving
        own[...] = inputs[:, : grid.channels].astype(own.dtype)
        shared[...] = inputs[:, grid.channels :].astype(shared.dtype)
        x, bc = slots
        first = pl.multiple_of(pl.program_id(1) * grid.channels, LANES)
        copy = pltpu.make_async_copy(own, x.at[:, pl.ds(first, grid.channels)], self.semaphores.at[0])
        copy.start()

        # Rows' blocks come one after the other where they share a group, and start from the same state.
        @pl.when(pl.program_id(1) % grid.sharing == grid.sharing - 1)
        def _():
            copies = [
                pltpu.make_async_copy(
                    shared.at[:, number * grid.shared : (number + 1) * grid.shared],
                    bc.at[:, lanes],
                    self.semaphores.at[1 + number],
                )
                for number, lanes in enumerate(self._shared(bc.shape[1]))
            ]
            for each in copies:
                each.start()
            for each in copies:
                each.wait()

        copy.wait()

    def advance(self) -> None:
        self.window.advance()

    def _shared(self, channels: int) -> list[Any]:
        """The block's numbers of B, and of C, among those of all groups."""
        first = pl.program_id(1) // self.grid.sharing * self.grid.shared
        starts = (first, channels // 2 + first)
        return [pl.ds(pl.multiple_of(start, LANES), self.grid.shared) for start in starts]

    def _activations(self, chunk: int, first: int, width: int) -> Float[Array, "CHUNK {width}"]:
        return self.window.wide_activations(first, width, self.filters, self.grid.dtype, chunk * CHUNK, CHUNK)
