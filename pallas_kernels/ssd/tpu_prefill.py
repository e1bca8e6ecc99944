"""Chunks of tokens through Mamba-2 on TPU, with the state in VMEM from the first chunk to the last.

The grid is rows x blocks of heads x spans of one or two chunks, spans innermost. A row's states are fetched from its
read slot at its first span and go to its write slot after its last; in between they stay where they are, transposed, so
that decays run along lanes. Spans beyond a row's length are neither fetched nor computed. A span within which a state
is wanted is computed a second time, up to there.

Products take bfloat16 factors where x came as bfloat16, else float32 ones; sums and states are float32.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tpu_sums
from pallas_kernels.ssd import tpu_chunk, tpu_decays
from pallas_kernels.ssd.tpu_chunk import Span
from pallas_kernels.ssd.tpu_decays import Decays
from pallas_kernels.ssd.tpu_grid import Grid
from pallas_kernels.ssd.tpu_inputs import Inputs, Vectors
from pallas_kernels.tpu_sums import CHUNK, LANES

# Blocks, states and what chunks keep take up to 12 MiB, and the compiler's spilled registers come on top.
_VMEM_BYTES = 32 << 20


def prefill(
    inputs: Inputs,
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    checkpoints: tuple[Int[Array, "B M"], Int[Array, "B M"]] | None = None,
    *,
    out_dtype: Any = jnp.float32,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H P"], tuple[Array, ...]]:
    """The outputs, and the new recurrent state followed by those of `inputs`.

    Arguments as in `pallas_kernels.ssd.ssd`; `checkpoints` are lengths and slots, `interpret` as of `pallas_call`.
    """
    grid, lanes = inputs.grid, 2 * inputs.grid.head_dim
    rates = jnp.repeat(jnp.stack([A, D]).astype(jnp.float32), CHUNK, axis=1)
    rates = rates.reshape(2, grid.blocks, grid.pairs, LANES).swapaxes(0, 1)
    operands = [
        *inputs.operands(),
        (grid.along_tokens(dt), grid.of_tokens()),
        (rates, pl.BlockSpec((None, *rates.shape[1:]), lambda row, block, *_: (block, 0, 0, 0))),
    ]
    states = state.reshape(*state.shape[:2], -1, grid.state_size)
    block = (grid.channels, grid.state_size)
    arrays, specs = [states, *(x for x, _ in inputs.states)], [_slot(block, 0), *(spec for _, spec in inputs.states)]
    targets: list[Array] = []
    out_spec, leaving = _slot(block, 1), []
    if checkpoints is not None:
        # The states of a row go to several slots: by copies rather than as an output's blocks.
        targets = [x.reshape(-1) for x in checkpoints]
        out_spec, leaving = _anywhere(), [pltpu.VMEM(block, state.dtype), pltpu.SemaphoreType.DMA]
    step = _Step(inputs, len(operands), None if checkpoints is None else checkpoints[0].shape[1])
    out = jax.ShapeDtypeStruct((grid.batch, grid.padded_tokens, grid.heads * grid.head_dim), out_dtype)
    moved = 2 * grid.batch + sum(x.size for x in targets[:1])  # states, in or out
    # Where blocks share a group, the last of them writes what it has besides the states, and comes after the others.
    ordered = grid.sharing > 1 and bool(inputs.states)
    out, *new_states = pl.pallas_call(
        functools.partial(_kernel, step),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4 + len(targets),
            grid=grid.steps,
            in_specs=[*(spec for _, spec in operands), *specs],
            out_specs=[grid.of_heads(), out_spec, *(_anywhere() for _ in inputs.states)],
            scratch_shapes=[
                pltpu.VMEM((1 if checkpoints is None else 2, grid.pairs, grid.state_size, lanes), jnp.float32),
                pltpu.VMEM((grid.pairs, CHUNK, LANES), jnp.float32),
                *tpu_decays.scratch(grid.span // CHUNK, grid.pairs, lanes, grid.dtype == jnp.float32),
                *inputs.scratch(),
                *leaving,
            ],
        ),
        out_shape=[out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)],
        input_output_aliases={4 + len(targets) + len(operands) + n: 1 + n for n in range(len(arrays))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary" if ordered else "parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * out.size * (CHUNK + 2 * grid.state_size),
            transcendentals=dt.size * 2 * CHUNK,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (out, *{id(x): x for x, _ in operands}.values()))
            + moved * grid.heads * grid.head_dim * grid.state_size * state.dtype.itemsize,
        ),
        interpret=interpret,
        name=f"{inputs.name}_prefill",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(x.astype(jnp.int32) for x in (read_slots, write_slots, lengths, *targets)),
        *(x for x, _ in operands),
        *arrays,
    )
    new_states[0] = new_states[0].reshape(state.shape)
    return out[:, : grid.tokens].reshape(grid.batch, grid.tokens, grid.heads, grid.head_dim), tuple(new_states)


def _slot(block: tuple[int, int], which: int) -> pl.BlockSpec:
    """Of [L, S, rows, _], by the read (0) or write (1) slots."""
    return pl.BlockSpec(
        (None, None, *block), lambda row, number, span, layer, *slots: (layer[0], slots[which][row], number, 0)
    )


def _anywhere() -> pl.BlockSpec:
    return pl.BlockSpec(memory_space=pl.ANY)


@dataclass(frozen=True)
class _Step:
    """`operands`: how many there are, of `inputs`, dt, and A and D; `checkpoints`: of a row, if it may have any."""

    inputs: Inputs
    operands: int
    checkpoints: int | None

    def split(self, references: tuple[Any, ...]) -> "_Block":
        """In the order in which `prefill` passes them."""
        take, inputs = iter(references), self.inputs
        of = lambda count: list(itertools.islice(take, count))  # noqa: E731
        own = len(inputs.states)
        operands, (dt, rates), (state,), states = of(self.operands - 2), of(2), of(1), of(own)
        (out, new_state), new_states, (h, diagonal, later), rows = of(2), of(own), of(3), of(4)
        vectors = inputs.vectors(operands, states, of(len(inputs.scratch())))
        chunks = range(inputs.grid.span // CHUNK)
        decays = [Decays(later, *(x.at[chunk] for x in rows)) for chunk in chunks]
        return _Block(
            inputs.grid, vectors, dt, rates, state, out, new_state, new_states, h, diagonal, later, decays, list(take)
        )


@dataclass(frozen=True)
class _Block:
    """References of a grid step: dt [heads, LANES]; A and D as `rates` [2, pairs, LANES]; state [heads P, N];
    out [span, heads P]; h [1 or 2, pairs, N, 2 P]; D's matrices and `later` for `tpu_chunk` and `tpu_decays`.

    `new_state` is a block like `state`, and `leaving` empty; with checkpoints it is all states, and `leaving` a block,
    from where it is copied, and a semaphore. `new_states` are all of each further state.
    """

    grid: Grid
    vectors: Vectors
    dt: Any
    rates: Any
    state: Any
    out: Any
    new_state: Any
    new_states: list[Any]
    h: Any
    diagonal: Any
    later: Any
    decays: list[Decays]
    leaving: list[Any]

    def start(self) -> None:
        """At a row's first span."""
        lanes = self.h.shape[3]
        for pair in range(self.grid.pairs):
            self.h[0, pair] = self.state[pair * lanes : (pair + 1) * lanes].astype(jnp.float32).T
            self.diagonal[pair] = tpu_chunk.diagonal(self.rates[1, pair : pair + 1])
        self.later[...] = tpu_decays.later_tokens(len(self.later) // LANES, lanes)
        self.vectors.start()

    def run(self, which: int | Int[Array, ""], valid: Int[Array, ""]) -> None:
        """Outputs, and next states in place of h[which], of the first `valid` tokens."""
        for number, decays in enumerate(self.decays):
            decays.prepare(tpu_sums.by_pair(self.dt, number), self.rates[0], valid - number * CHUNK)
        tpu_chunk.run(Span(self.grid, self.vectors, self.decays, self.diagonal, self.h.at[which], self.out))

    def keep(self, which: int, tokens: Int[Array, ""], layer: Int[Array, ""], slot: Int[Array, ""]) -> None:
        """The states after so many tokens of the span, the recurrent one being h[which]."""
        kept, lanes = self.leaving[0] if self.leaving else self.new_state, self.h.shape[3]
        for pair in range(self.grid.pairs):
            kept[pair * lanes : (pair + 1) * lanes] = self.h[which, pair].T.astype(kept.dtype)
        if self.leaving:
            rows = pl.ds(pl.program_id(1) * len(kept), len(kept))
            copy = pltpu.make_async_copy(kept, self.new_state.at[layer, slot, rows], self.leaving[1])
            copy.start()
            copy.wait()
        self.vectors.keep(tokens, [state.at[layer, slot] for state in self.new_states])


def _kernel(step: _Step, layer, read_slots, write_slots, lengths, *references):
    """The references after the lengths: lengths and slots of checkpoints, if any, and what `_Step.split` takes."""
    row, span_number, span = pl.program_id(0), pl.program_id(2), step.inputs.grid.span
    targets, references = ((), references) if step.checkpoints is None else (references[:2], references[2:])
    block = step.split(references)
    left = lengths[row] - span_number * span

    @pl.when(span_number == 0)
    def _():
        block.start()

    @pl.when(left > 0)
    def _():
        block.vectors.load(left)
        if step.checkpoints is None:
            block.run(0, left)
        else:
            _run_to_checkpoints(step.checkpoints, block, layer, left, span_number * span, *targets)

    @pl.when((left <= span) & ((left > 0) | (span_number == 0)))
    def _():
        block.keep(0, jnp.maximum(left, 0), layer[0], write_slots[row])

    @pl.when(left > span)
    def _():
        block.vectors.advance()


def _run_to_checkpoints(checkpoints: int, block: _Block, layer, left, begin, checkpoint_lengths, checkpoint_slots):
    """Runs the span, and before that once up to each checkpoint within it.

    The span's own turn comes last: one loop, so that its program is there only once.
    """

    @pl.loop(0, checkpoints + 1)
    def _(turn):
        own = turn == checkpoints
        number = pl.program_id(0) * checkpoints + jnp.minimum(turn, checkpoints - 1)
        until = checkpoint_lengths[number] - begin

        @pl.when(own | ((until > 0) & (until <= block.grid.span)))
        def _():
            @pl.when(jnp.logical_not(own))
            def _():
                block.h[1] = block.h[0]

            block.run(jnp.where(own, 0, 1), jnp.where(own, left, until))

            @pl.when(jnp.logical_not(own))
            def _():
                block.keep(1, until, layer[0], checkpoint_slots[number])
