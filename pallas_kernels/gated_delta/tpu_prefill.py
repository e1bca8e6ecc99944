"""Chunks of tokens through the gated delta rule on TPU, with the state in VMEM from the first chunk to the last.

The grid is rows x blocks of value heads x spans of one or two chunks, spans innermost. A row's states are fetched from
its read slot at its first span and go to its write slot after its last; in between they stay where they are. Spans
beyond a row's length are neither fetched nor computed. A span within which a state is wanted is computed a second time,
up to there.

The maths is that of `xla.py`: decays are products of numbers at most 1, or exponentials of a sum over just their own
tokens. Products take bfloat16 factors where q came as bfloat16, else float32 ones; sums and states are float32.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tpu_sums
from pallas_kernels.gated_delta import tpu_chunk, tpu_per_channel, tpu_per_head
from pallas_kernels.gated_delta.tpu_chunk import Kept, Keys
from pallas_kernels.gated_delta.tpu_grid import Grid, State
from pallas_kernels.gated_delta.tpu_inputs import Inputs, Vectors
from pallas_kernels.tpu_sums import CHUNK, LANES

# Blocks, states and what chunks keep take up to 15 MiB, and the compiler's spilled registers come on top.
_VMEM_BYTES = 32 << 20


def prefill(
    inputs: Inputs,
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    checkpoints: tuple[Int[Array, "B M"], Int[Array, "B M"]] | None = None,
    *,
    out_dtype: Any = jnp.float32,
    interpret: Any = False,
) -> tuple[Float[Array, "B T Hv dv"], tuple[Array, ...]]:
    """The outputs, and the new recurrent state followed by those of `inputs`.

    Arguments as in `pallas_kernels.gated_delta.gated_delta`; `checkpoints` are lengths and slots, `interpret` as of
    `pallas_call`.
    """
    grid, per_channel = inputs.grid, log_decay.ndim == 4
    operands = [*inputs.operands(), *_gates(grid, log_decay, beta)]
    states = (State(state, (grid.size, *state.shape[3:]), 0), *inputs.states)
    targets: list[Array] = []
    kernel, out_specs, leaving = _kernel, [x.spec(1) for x in states], []
    if checkpoints is not None:
        # The states of a row go to several slots: by copies rather than as an output's blocks.
        targets = [x.reshape(-1) for x in checkpoints]
        kernel, out_specs = _checkpointing_kernel, [pl.BlockSpec(memory_space=pl.ANY)] * len(states)
        leaving = [*(pltpu.VMEM(x.block, x.array.dtype) for x in states), pltpu.SemaphoreType.DMA((len(states),))]
    step = _Step(inputs, per_channel, states, len(operands), 0 if checkpoints is None else checkpoints[0].shape[1])
    values = grid.vectors(grid.size * grid.value_dim)
    out = jax.ShapeDtypeStruct((grid.batch, grid.padded_tokens, grid.value_heads * grid.value_dim), out_dtype)
    moved = 2 * grid.batch + sum(x.size for x in targets[:1])  # states, in or out
    out, *new_states = pl.pallas_call(
        functools.partial(kernel, step),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4 + len(targets),
            grid=grid.steps,
            in_specs=[*(spec for _, spec in operands), *(x.spec(0) for x in states)],
            out_specs=[values, *out_specs],
            scratch_shapes=[
                pltpu.VMEM((1 if checkpoints is None else 2, *states[0].block), jnp.float32),
                *tpu_chunk.scratch(grid.span // CHUNK, grid.size, grid.key_dim, grid.dtype, per_channel),
                *inputs.scratch(),
                *leaving,
            ],
        ),
        out_shape=[out, *(jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in states)],
        input_output_aliases={4 + len(targets) + len(operands) + n: 1 + n for n in range(len(states))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * out.size * (2 * CHUNK + 3 * grid.key_dim),
            transcendentals=log_decay.size,
            # Three blocks of one array are still one array.
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (out, *{id(x): x for x, _ in operands}.values()))
            + moved * sum(grid.blocks * math.prod(x.block) * x.array.dtype.itemsize for x in states),
        ),
        interpret=interpret,
        name=f"{inputs.name}_prefill",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(x.astype(jnp.int32) for x in (read_slots, write_slots, lengths, *targets)),
        *(x for x, _ in operands),
        *(x.array for x in states),
    )
    return out[:, : grid.tokens].reshape(grid.batch, grid.tokens, grid.value_heads, -1), tuple(new_states)


def _gates(grid: Grid, log_decay: Array, beta: Array) -> list[tuple[Any, pl.BlockSpec]]:
    """Log decays, beta and, for decays of a head, the constants of `tpu_sums`, and their blocks of a grid step."""
    pairs = pl.cdiv(grid.size, 2)
    scalars = pl.BlockSpec(
        (None, None, grid.span // CHUNK, pairs, LANES),
        lambda row, block, number, layer, read, write, lengths, *_: (
            row, block, grid.current(number, lengths, row), 0, 0
        ),
    )  # fmt: skip
    weights = _rows_of_scalars(grid, beta), scalars
    if log_decay.ndim == 4:
        return [(grid.flat(log_decay), grid.vectors(grid.size * grid.key_dim)), weights]
    constants = tpu_sums.constants(pairs, LANES, grid.dtype == jnp.float32)
    whole = [(x, pl.BlockSpec(x.shape, lambda *_: (0, 0))) for x in constants]
    return [(_rows_of_scalars(grid, log_decay), scalars), weights, *whole]


def _rows_of_scalars(grid: Grid, x: Float[Array, "B T Hv"]) -> Float[Array, "B blocks chunks pairs L"]:
    """A number of each head and token: of two heads' tokens, side by side."""
    batch, _, spans = grid.steps
    x = grid.padded(x.astype(jnp.float32), spans * grid.span)
    x = x.reshape(batch, -1, CHUNK, grid.blocks, grid.size)
    x = jnp.pad(x, [(0, 0)] * 4 + [(0, grid.size % 2)]).transpose(0, 3, 1, 4, 2)
    return x.reshape(batch, grid.blocks, x.shape[2], -1, LANES)


@dataclass(frozen=True)
class _Step:
    """`operands`: how many there are, of `inputs`, the log decays, beta, and constants; `checkpoints`: of a row."""

    inputs: Inputs
    per_channel: bool
    states: tuple[State, ...]
    operands: int
    checkpoints: int

    def split(self, references: tuple[Any, ...]) -> "_Block":
        """In the order in which `prefill` passes them."""
        take = iter(references)
        of = lambda count: list(itertools.islice(take, count))  # noqa: E731
        count = 0 if self.per_channel else 2
        operands, (log_decay, beta), constants = of(self.operands - 2 - count), of(2), of(count)
        states, (out,), new_states, (S,), kept = of(len(self.states)), of(1), of(len(self.states)), of(1), of(4)
        vectors = self.inputs.vectors(operands, of(len(self.inputs.scratch())))
        return _Block(vectors, log_decay, beta, constants, states, out, new_states, S, kept, list(take))


@dataclass(frozen=True)
class _Block:
    """References of a grid step: log_decay [span, hv dk] or [chunks, pairs, L]; beta [chunks, pairs, L]; constants of
    `tpu_sums` where decay is per head; blocks of states before and after; out [span, hv dv]; S [1 or 2, hv, dk, dv];
    `Kept` of each chunk. With checkpoints, `new_states` are all of them, and `leaving` a block of each, from where it
    is copied, and semaphores."""

    vectors: Vectors
    log_decay: Any
    beta: Any
    constants: list[Any]
    states: list[Any]
    out: Any
    new_states: list[Any]
    S: Any
    kept: list[Any]
    leaving: list[Any]

    def start(self) -> None:
        """At a row's first span."""
        self.S[0] = self.states[0][...].astype(jnp.float32)
        self.vectors.start(self.states[1:])

    def after(self, which: int, tokens: Int[Array, ""]) -> list[Array]:
        """All states after so many tokens of the span, the recurrent one in S."""
        return [self.S[which], *self.vectors.last(tokens)]


def _kernel(step: _Step, layer, read_slots, write_slots, lengths, *references):
    """The references after the lengths as `_Step.split` takes them."""
    block, span, number = step.split(references), step.inputs.grid.span, pl.program_id(2)
    left = lengths[pl.program_id(0)] - number * span

    @pl.when(number == 0)
    def _():
        block.start()

    @pl.when(left > 0)
    def _():
        block.vectors.load()
        _run(step, block, 0, left)

    @pl.when((left <= span) & ((left > 0) | (number == 0)))
    def _():
        for new, value in zip(block.new_states, block.after(0, jnp.maximum(left, 0)), strict=True):
            new[...] = value.astype(new.dtype)

    @pl.when(left > span)
    def _():
        block.vectors.advance()


def _checkpointing_kernel(
    step: _Step, layer, read_slots, write_slots, lengths, checkpoint_lengths, checkpoint_slots, *references
):
    """As `_kernel`. A span with a checkpoint in it is computed once more, up to there."""
    row, heads, span_number = (pl.program_id(axis) for axis in range(3))
    block, span = step.split(references), step.inputs.grid.span
    left = lengths[row] - span_number * span

    def keep(which, tokens, slot):
        *leaving, semaphores = block.leaving
        copies = []
        for n, value in enumerate(block.after(which, tokens)):
            leaving[n][...] = value.astype(leaving[n].dtype)
            target = step.states[n].block_of(block.new_states[n].at[layer[0], slot], heads)
            copies.append(pltpu.make_async_copy(leaving[n], target, semaphores.at[n]))
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    @pl.when(span_number == 0)
    def _():
        block.start()

    @pl.when(left > 0)
    def _():
        block.vectors.load()

        # The span's own turn comes last: one loop, so that its program is there only once.
        @pl.loop(0, step.checkpoints + 1)
        def _(turn):
            own = turn == step.checkpoints
            number = row * step.checkpoints + jnp.minimum(turn, step.checkpoints - 1)
            until = checkpoint_lengths[number] - span_number * span

            @pl.when(own | ((until > 0) & (until <= span)))
            def _():
                @pl.when(jnp.logical_not(own))
                def _():
                    block.S[1] = block.S[0]

                _run(step, block, jnp.where(own, 0, 1), jnp.where(own, left, until))

                @pl.when(jnp.logical_not(own))
                def _():
                    keep(1, until, checkpoint_slots[number])

    @pl.when((left <= span) & ((left > 0) | (span_number == 0)))
    def _():
        keep(0, jnp.maximum(left, 0), write_slots[row])

    @pl.when(left > span)
    def _():
        block.vectors.advance()


def _run(step: _Step, block: _Block, which: int | Int[Array, ""], valid: Int[Array, ""]) -> None:
    """Outputs, and next states in place of S[which], of the first `valid` tokens."""
    grid, works, applied = step.inputs.grid, [], []
    for number in range(grid.span // CHUNK):
        rows, left = pl.ds(number * CHUNK, CHUNK), valid - number * CHUNK
        kept = Kept(*(x.at[number] for x in block.kept))
        keys = Keys(grid, block.vectors, number, left)
        if step.per_channel:
            works += tpu_per_channel.prepare(keys, block.log_decay.at[rows], block.beta.at[number], kept, left)
        else:
            decays, beta = block.log_decay.at[number], block.beta.at[number]
            works += tpu_per_head.prepare(keys, decays, beta, block.constants, kept, left)
        values = functools.partial(block.vectors.v, number)
        applied.append((values, kept, block.S.at[which], block.out.at[rows], keys, left))
    tpu_chunk.in_step(works)
    for arguments in applied:
        tpu_chunk.apply(*arguments, step.per_channel)
