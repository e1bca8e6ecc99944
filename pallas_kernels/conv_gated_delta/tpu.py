"""Short convolution, SiLU and the gated delta rule of many tokens on TPU, in one pass over memory.

The kernel is that of `gated_delta/tpu_prefill.py`. What it takes for q, k and v are the convolution's inputs: a window
in VMEM holds a span's behind the last K-1 of the span before, and a head's q, k or v is convolved where it is used: q
and k once for all value heads of a key head, v beside the products with the states, of which the matrix unit has many
and the vector unit few.

Activations are rounded to the inputs' dtype, as `short_conv` returns them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.conv_gated_delta.separate import key_heads
from pallas_kernels.gated_delta import tpu_decode, tpu_prefill
from pallas_kernels.gated_delta.tpu_grid import Grid, State
from pallas_kernels.short_conv import tpu_window
from pallas_kernels.short_conv.tpu_window import Window
from pallas_kernels.tpu_sums import CHUNK, LANES


def accepts(inputs: Array, filters: Array, conv_states: tuple[Array, ...], *rest: Any, **__: Any) -> str | None:
    """Why the kernel cannot run these arguments of `conv_gated_delta`, or None."""
    return tpu_window.refusal(filters.shape[-1]) or tpu_decode.accepts_widths(*rest[2].shape[3:])


def conv_gated_delta(
    inputs: Float[Array, "B T C"] | Float[Array, "B T 3 W"],
    filters: Float[Array, "C K"] | Float[Array, "3 W K"],
    conv_states: tuple[Float[Array, "L N K-1 _"], ...],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T Hv dv"], tuple[Float[Array, "L N K-1 _"], ...], Float[Array, "L N Hv dk dv"]]:
    """Arguments and result as in `pallas_kernels.conv_gated_delta.conv_gated_delta`; `interpret` is `pallas_call`'s."""
    checkpoints = None
    if checkpoint_lengths is not None and checkpoint_slots is not None:
        checkpoints = checkpoint_lengths, checkpoint_slots
    out, (state, *conv) = tpu_prefill.prefill(
        _Convolved(inputs, filters, conv_states, state),
        *(log_decay, beta, state, layer, read_slots, write_slots, lengths, checkpoints),
        out_dtype=inputs.dtype,
        interpret=interpret,
    )
    return out, tuple(conv), state


@dataclass(frozen=True)
class _Convolved:
    """`Inputs` of `gated_delta/tpu_inputs.py`; `recurrent` for its widths."""

    inputs: Float[Array, "B T C"] | Float[Array, "B T 3 W"]
    filters: Float[Array, "C K"] | Float[Array, "3 W K"]
    conv_states: tuple[Float[Array, "L N K-1 _"], ...]
    recurrent: Float[Array, "L N Hv dk dv"]
    name: str = "conv_gated_delta"

    @property
    def grid(self) -> Grid:
        """The call's."""
        (batch, tokens), (value_heads, key_dim, value_dim) = self.inputs.shape[:2], self.recurrent.shape[2:]
        heads = key_heads(self.inputs, self.recurrent)
        return Grid(batch, tokens, heads, value_heads, key_dim, value_dim, self.inputs.dtype)

    @property
    def states(self) -> tuple[State, ...]:
        """The convolutions'."""
        blocks = self.grid.blocks
        return tuple(State(x, (x.shape[2], x.shape[3] // blocks), 1) for x in self.conv_states)

    def operands(self) -> list[tuple[Any, pl.BlockSpec]]:
        """Inputs of each convolution, and the filters of a block's, side by side."""
        grid, inputs = self.grid, self.grid.flat(self.inputs)
        widths = [state.block[1] for state in self.states]
        blocks = [(inputs, grid.vectors(width, number * grid.blocks)) for number, width in enumerate(widths)]
        filters = tpu_window.filters_of(self.filters.reshape(-1, self.filters.shape[-1]), None, self.inputs.dtype)
        filters = filters.reshape(len(filters), len(widths), grid.blocks, -1).transpose(2, 0, 1, 3)
        filters = filters.reshape(grid.blocks, filters.shape[1], -1)
        return [*blocks, (filters, pl.BlockSpec((None, *filters.shape[1:]), lambda row, block, *_: (block, 0, 0)))]

    def scratch(self) -> list[Any]:
        """The window."""
        return [tpu_window.scratch(self.grid.span, sum(state.block[1] for state in self.states))]

    def vectors(self, operands: Sequence[Any], scratch: Sequence[Any]) -> "_Window":
        """From references to both."""
        *inputs, filters = operands
        return _Window(self.grid, inputs, filters, Window(scratch[0], self.filters.shape[-1] - 1))


@dataclass(frozen=True)
class _Window:
    """`Vectors` of `gated_delta/tpu_inputs.py`, by references to blocks [span, _] of one or three convolutions."""

    grid: Grid
    inputs: list[Any]
    filters: Any
    window: Window

    def start(self, states: Sequence[Any]) -> None:
        self.window.start(jnp.concatenate([state[...] for state in states], axis=1))

    def load(self) -> None:
        number = 0
        for block in self.inputs:
            for first in range(0, block.shape[1], LANES):
                self.window.put(number, block[:, first : first + LANES])
                number += 1

    def q(self, chunk: int, key_head: int) -> Float[Array, "C dk"]:
        return self._activations(chunk, self._places()[0][key_head], self.grid.key_dim)

    def k(self, chunk: int, key_head: int) -> Float[Array, "C dk"]:
        return self._activations(chunk, self._places()[1][key_head], self.grid.key_dim)

    def v(self, chunk: int, value_head: int) -> Float[Array, "C dv"]:
        return self._activations(chunk, self._places()[2][value_head], self.grid.value_dim)

    def last(self, tokens: int | Int[Array, ""]) -> list[Array]:
        inputs, widths = self.window.last(tokens), [block.shape[1] for block in self.inputs]
        starts = [sum(widths[:n]) for n in range(len(widths))]
        return [inputs[:, start : start + width] for start, width in zip(starts, widths, strict=True)]

    def advance(self) -> None:
        self.window.advance()

    def _places(self) -> tuple[list[int], list[int], list[int]]:
        """First channels of each head's q, k and v in the window."""
        grid = self.grid
        keys, values = range(grid.size // grid.groups), range(grid.size)
        if len(self.inputs) > 1:
            width = len(keys) * grid.key_dim
            q = [head * grid.key_dim for head in keys]
            return q, [width + place for place in q], [2 * width + head * grid.value_dim for head in values]
        q = [head * (2 * grid.key_dim + grid.groups * grid.value_dim) for head in keys]
        v = [q[head // grid.groups] + 2 * grid.key_dim + head % grid.groups * grid.value_dim for head in values]
        return q, [place + grid.key_dim for place in q], v

    def _activations(self, chunk: int, first: int, width: int) -> Float[Array, "C {width}"]:
        return self.window.wide_activations(first, width, self.filters, self.grid.dtype, chunk * CHUNK, CHUNK)
