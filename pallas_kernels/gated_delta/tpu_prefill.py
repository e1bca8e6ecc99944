"""Chunks of tokens through the gated delta rule on TPU, with the state in VMEM from the first chunk to the last.

The grid is rows x blocks of value heads x spans of one or two chunks, spans innermost. A row's states are fetched from
its read slot at its first span and go to its write slot after its last; in between they stay where they are. Spans
beyond a row's length are neither fetched nor computed. A span within which a state is wanted is computed a second time,
up to there.

The maths is that of `xla.py`: decays are products of numbers at most 1, or exponentials of a sum over just their own
tokens. Products take bfloat16 factors where q came as bfloat16, else float32 ones; sums and states are float32.
"""

import functools
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
from pallas_kernels.gated_delta.tpu_decode import heads_per_block
from pallas_kernels.tpu_sums import CHUNK, LANES

# Chunks that are prepared together: what waits in one of them is hidden by the others.
MOST_CHUNKS = 2
# Blocks, states and what chunks keep take up to 15 MiB, and the compiler's spilled registers come on top.
_VMEM_BYTES = 32 << 20


def prefill(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    checkpoints: tuple[Int[Array, "B M"], Int[Array, "B M"]] | None = None,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "L N Hv dk dv"]]:
    """Arguments and result as in `pallas_kernels.gated_delta.gated_delta`; `checkpoints` are lengths and slots,
    `interpret` as of `pallas_call`."""
    batch, tokens, value_heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    groups = value_heads // key_heads
    # Float32 inputs' blocks and products take twice the room.
    size = heads_per_block(value_heads, groups, key_dim * value_dim * 2 * q.dtype.itemsize)
    blocks, pairs, per_channel = value_heads // size, pl.cdiv(size, 2), log_decay.ndim == 4
    span = tokens_per_step(tokens)
    spans, chunks = pl.cdiv(tokens, span), span // CHUNK
    # A last span that is not full reaches beyond the arrays; only a block must not be larger than its array.
    padded_tokens = max(tokens, span)

    def current(span_number, lengths, row):
        """The span, or the row's last one."""
        return jnp.minimum(span_number, jax.lax.div(jnp.maximum(lengths[row] - 1, 0), span))

    def vectors(width):
        """Of a span's tokens and a block's heads, side by side: [span, heads * width of one]."""
        return pl.BlockSpec(
            (None, span, width),
            lambda row, block, number, layer, read, write, lengths, *_: (row, current(number, lengths, row), block),
        )

    scalars = pl.BlockSpec(
        (None, None, chunks, pairs, LANES),
        lambda row, block, number, layer, read, write, lengths, *_: (row, block, current(number, lengths, row), 0, 0),
    )

    def padded(x, tokens):
        return jnp.pad(x, [(0, 0), (0, tokens - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])

    def rows_of_scalars(x):
        """[B, blocks, chunks, pairs, (head, token)]"""
        x = padded(x.astype(jnp.float32), spans * span).reshape(batch, spans * chunks, CHUNK, blocks, size)
        x = jnp.pad(x, [(0, 0)] * 4 + [(0, size % 2)]).transpose(0, 3, 1, 4, 2)
        return x.reshape(batch, blocks, spans * chunks, pairs, LANES)

    def slot(which):
        return pl.BlockSpec(
            (None, None, size, key_dim, value_dim),
            lambda row, block, number, layer, *slots: (layer[0], slots[which][row], block, 0, 0),
        )

    def flat(x):
        return padded(x.reshape(batch, tokens, -1), padded_tokens)

    keys_width = size // groups * key_dim
    constants = [] if per_channel else tpu_sums.constants(pairs, LANES, q.dtype == jnp.float32)
    shape = _Shape(span, per_channel, 0 if checkpoints is None else checkpoints[0].shape[1])
    targets: list[Array] = []
    out_slot, kept = slot(1), []
    if checkpoints is not None:
        # The states of a row go to several slots: by copies rather than as an output's blocks.
        targets, out_slot = [x.reshape(-1) for x in checkpoints], pl.BlockSpec(memory_space=pl.ANY)
        kept = [pltpu.VMEM((size, key_dim, value_dim), state.dtype), pltpu.SemaphoreType.DMA]
    moved = 2 * batch + sum(x.size for x in targets[:1])  # states, in or out
    out, state = pl.pallas_call(
        functools.partial(_kernel if checkpoints is None else _checkpointing_kernel, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4 + len(targets),
            grid=(batch, blocks, spans),
            in_specs=[
                vectors(keys_width),
                vectors(keys_width),
                vectors(size * value_dim),
                vectors(size * key_dim) if per_channel else scalars,
                scalars,
                *(pl.BlockSpec(x.shape, lambda *_: (0, 0)) for x in constants),
                slot(0),
            ],
            out_specs=[vectors(size * value_dim), out_slot],
            scratch_shapes=[
                pltpu.VMEM((1 if checkpoints is None else 2, size, key_dim, value_dim), jnp.float32),
                *kept,
                *tpu_chunk.scratch(chunks, size, key_dim, q.dtype, per_channel),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, padded_tokens, value_heads * value_dim), jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={9 + len(targets) + len(constants): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * v.size * (2 * CHUNK + 3 * key_dim),
            transcendentals=log_decay.size,
            bytes_accessed=moved * value_heads * key_dim * value_dim * state.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for x in (q, k, v, log_decay, beta))
            + v.size * 4,
        ),
        interpret=interpret,
        name="gated_delta_prefill",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(x.astype(jnp.int32) for x in (read_slots, write_slots, lengths, *targets)),
        *map(flat, (q, k, v)),
        flat(log_decay) if per_channel else rows_of_scalars(log_decay),
        rows_of_scalars(beta),
        *constants,
        state,
    )
    return out[:, :tokens].reshape(v.shape), state


def tokens_per_step(tokens: int) -> int:
    """Of a grid step, in a call of so many tokens."""
    return min(MOST_CHUNKS, -(-tokens // CHUNK)) * CHUNK


@dataclass(frozen=True)
class _Shape:
    """Tokens of a grid step, whether decay is per channel, and checkpoints of a row."""

    span: int
    per_channel: bool
    checkpoints: int

    def split(self, references: tuple[Any, ...]) -> tuple["_Inputs", tuple[Any, ...]]:
        """A grid step's inputs, and the references after them."""
        (q, k, v, log_decay, beta), rest = references[:5], references[5:]
        constants = 0 if self.per_channel else 2
        return _Inputs(q, k, v, log_decay, beta, rest[:constants]), rest[constants:]


@dataclass(frozen=True)
class _Inputs:
    """Blocks: q, k [span, hk dk]; v [span, hv dv]; log_decay [span, hv dk] or [chunks, pairs, L]; beta
    [chunks, pairs, L]; constants of `tpu_sums` where decay is per head."""

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    constants: Any


def _kernel(shape: _Shape, layer, read_slots, write_slots, lengths, *references):
    """After the inputs: states [hv, dk, dv], out [span, hv dv], new states; S [1, hv, dk, dv]; `Kept` of each chunk."""
    inputs, (state, out, new_state, S, *kept) = shape.split(references)
    number = pl.program_id(2)
    left = lengths[pl.program_id(0)] - number * shape.span

    @pl.when(number == 0)
    def _():
        S[0] = state[...].astype(jnp.float32)

    @pl.when(left > 0)
    def _():
        _run(shape, inputs, kept, S.at[0], out, left)

    @pl.when((left <= shape.span) & ((left > 0) | (number == 0)))
    def _():
        new_state[...] = S[0].astype(new_state.dtype)


def _checkpointing_kernel(
    shape: _Shape, layer, read_slots, write_slots, lengths, checkpoint_lengths, checkpoint_slots, *references
):
    """As `_kernel`, with all states as `new_states`, to which `leaving` [hv, dk, dv] is copied wherever a state is
    wanted; S [2, hv, dk, dv].

    A span with a checkpoint in it is computed once more, up to there.
    """
    inputs, (state, out, new_states, S, leaving, semaphore, *kept) = shape.split(references)
    row, block, span_number = (pl.program_id(axis) for axis in range(3))
    left = lengths[row] - span_number * shape.span

    def keep(which, slot):
        leaving[...] = S[which].astype(leaving.dtype)
        heads = pl.ds(block * len(leaving), len(leaving))
        copy = pltpu.make_async_copy(leaving, new_states.at[layer[0], slot, heads], semaphore)
        copy.start()
        copy.wait()

    @pl.when(span_number == 0)
    def _():
        S[0] = state[...].astype(jnp.float32)

    @pl.when(left > 0)
    def _():
        # The span's own turn comes last: one loop, so that its program is there only once.
        @pl.loop(0, shape.checkpoints + 1)
        def _(turn):
            own = turn == shape.checkpoints
            number = row * shape.checkpoints + jnp.minimum(turn, shape.checkpoints - 1)
            until = checkpoint_lengths[number] - span_number * shape.span

            @pl.when(own | ((until > 0) & (until <= shape.span)))
            def _():
                @pl.when(jnp.logical_not(own))
                def _():
                    S[1] = S[0]

                _run(shape, inputs, kept, S.at[jnp.where(own, 0, 1)], out, jnp.where(own, left, until))

                @pl.when(jnp.logical_not(own))
                def _():
                    keep(1, checkpoint_slots[number])

    @pl.when((left <= shape.span) & ((left > 0) | (span_number == 0)))
    def _():
        keep(0, write_slots[row])


def _run(shape: _Shape, inputs: _Inputs, references: list[Any], S: Any, out: Any, valid: Int[Array, ""]) -> None:
    """Outputs, and next states in place of S, of the first `valid` tokens."""
    heads, key_dim, _ = S.shape
    works, applied = [], []
    for number in range(shape.span // CHUNK):
        rows, left = pl.ds(number * CHUNK, CHUNK), valid - number * CHUNK
        kept = Kept(*(x.at[number] for x in references))
        keys = Keys(inputs.q.at[rows], inputs.k.at[rows], key_dim, heads, left)
        beta = inputs.beta.at[number]
        if shape.per_channel:
            works += tpu_per_channel.prepare(keys, inputs.log_decay.at[rows], beta, kept, left)
        else:
            decays = inputs.log_decay.at[number]
            works += tpu_per_head.prepare(keys, decays, beta, inputs.constants, kept, left)
        applied.append((inputs.v.at[rows], kept, S, out.at[rows], left, shape.per_channel))
    tpu_chunk.in_step(works)
    for arguments in applied:
        tpu_chunk.apply(*arguments)
