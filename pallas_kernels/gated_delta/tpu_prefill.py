"""Chunks of tokens through the gated delta rule on TPU, with the state in VMEM from the first chunk to the last.

The grid is rows x blocks of value heads x chunks, chunks innermost. A row's states are fetched from its read slot at
its first chunk and go to its write slot after its last; in between they stay where they are, transposed, so that
decays run along lanes. Chunks beyond a row's length are neither fetched nor computed. A chunk within which a state is
wanted is computed a second time, up to there.

The maths is that of `xla.py`: decays are products of numbers at most 1, or exponentials of a sum over just their own
tokens. Products take bfloat16 factors where q came as bfloat16, else float32 ones; sums and states are float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import tpu_chunk

CHUNK = tpu_chunk.CHUNK

# States of one grid step, in and out, are in VMEM twice each, and once more to be computed on.
BLOCK_BYTES = 1 << 20


def heads_per_block(value_heads: int, groups: int, state_bytes: int) -> int:
    """Value heads of a grid step: as many whole groups as fit into `BLOCK_BYTES`, at least one; divides the heads.

    `state_bytes`: of a head, float32; twice that for float32 inputs, whose blocks and products take more room.
    """
    key_heads = value_heads // groups
    fitting = [n for n in range(1, key_heads + 1) if key_heads % n == 0 and n * groups * state_bytes <= BLOCK_BYTES]
    return groups * max(fitting, default=1)


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
    size = heads_per_block(value_heads, groups, key_dim * value_dim * 2 * q.dtype.itemsize)
    blocks, chunks = value_heads // size, -(-tokens // CHUNK)
    per_channel = log_decay.ndim == 4
    # A last chunk that is not full reaches beyond the arrays; only a block must not be larger than its array.
    padded_tokens = max(tokens, CHUNK)

    def last_chunk(lengths, row):
        return jax.lax.div(jnp.maximum(lengths[row] - 1, 0), CHUNK)

    def vectors(width):
        """Of a chunk's tokens and a block's heads, side by side: [CHUNK, heads * width of one]."""
        return pl.BlockSpec(
            (None, CHUNK, width),
            lambda row, block, chunk, layer, read, write, lengths, *_: (
                row, jnp.minimum(chunk, last_chunk(lengths, row)), block
            ),
        )  # fmt: skip

    scalars = pl.BlockSpec(
        (None, None, None, size, CHUNK),
        lambda row, block, chunk, layer, read, write, lengths, *_: (
            row, jnp.minimum(chunk, last_chunk(lengths, row)), block, 0, 0
        ),
    )  # fmt: skip

    def padded(x, tokens):
        return jnp.pad(x, [(0, 0), (0, tokens - x.shape[1]), (0, 0)])

    def rows_of_scalars(x):
        x = padded(x.astype(jnp.float32), chunks * CHUNK)
        return jnp.moveaxis(x.reshape(batch, chunks, CHUNK, blocks, size), 2, 4)

    def slot(which):
        return pl.BlockSpec(
            (None, None, size, key_dim, value_dim),
            lambda row, block, chunk, layer, *slots: (layer[0], slots[which][row], block, 0, 0),
        )

    def flat(x):
        return padded(x.reshape(batch, tokens, -1), padded_tokens)

    keys_width = size // groups * key_dim
    kernel: Callable[..., None] = _kernel
    targets: list[Array] = []
    out_slot, kept = slot(1), []
    if checkpoints is not None:
        # The states of a row go to several slots: by copies rather than as an output's blocks.
        kernel = functools.partial(_checkpointing_kernel, checkpoints[0].shape[1])
        targets, out_slot = [x.reshape(-1) for x in checkpoints], pl.BlockSpec(memory_space=pl.ANY)
        kept = [pltpu.VMEM((size, key_dim, value_dim), state.dtype), pltpu.SemaphoreType.DMA]
    moved = 2 * batch + sum(x.size for x in targets[:1])  # states, in or out
    out, state = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4 + len(targets),
            grid=(batch, blocks, chunks),
            in_specs=[
                vectors(keys_width),
                vectors(keys_width),
                vectors(size * value_dim),
                vectors(size * key_dim) if per_channel else scalars,
                scalars,
                slot(0),
            ],
            out_specs=[vectors(size * value_dim), out_slot],
            scratch_shapes=[pltpu.VMEM((size, value_dim, key_dim), jnp.float32), *kept],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, padded_tokens, value_heads * value_dim), jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={9 + len(targets): 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
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
        state,
    )
    return out[:, :tokens].reshape(v.shape), state


def _kernel(layer, read_slots, write_slots, lengths, q, k, v, log_decay, beta, state, out, new_state, S):
    """Blocks: q, k [C, hk dk]; v, out [C, hv dv]; log_decay [C, hv dk] or [hv, C]; beta [hv, C]; states [hv, dk, dv];
    S [hv, dv, dk]."""
    chunk = pl.program_id(2)
    left = lengths[pl.program_id(0)] - chunk * CHUNK

    @pl.when(chunk == 0)
    def _():
        _load(state, S)

    @pl.when(left > 0)
    def _():
        outs, S[...] = _run(q, k, v, log_decay, beta, S, left)
        _store_outputs(outs, out)

    @pl.when((left <= CHUNK) & ((left > 0) | (chunk == 0)))
    def _():
        _store(S[...], new_state)


def _checkpointing_kernel(
    checkpoints, layer, read_slots, write_slots, lengths, checkpoint_lengths, checkpoint_slots,
    q, k, v, log_decay, beta, state, out, new_states, S, kept, semaphore,
):  # fmt: skip
    """As `_kernel`, with all states as `new_states`, to which `kept` [hv, dk, dv] is copied wherever a state is wanted.

    A chunk with a checkpoint in it is computed once more, up to there.
    """
    row, block, chunk = (pl.program_id(axis) for axis in range(3))
    left = lengths[row] - chunk * CHUNK

    def keep(states, slot):
        _store(states, kept)
        heads = pl.ds(block * len(kept), len(kept))
        copy = pltpu.make_async_copy(kept, new_states.at[layer[0], slot, heads], semaphore)
        copy.start()
        copy.wait()

    @pl.when(chunk == 0)
    def _():
        _load(state, S)

    @pl.when(left > 0)
    def _():
        # The chunk's own turn comes last: one loop, so that its program is there only once.
        @pl.loop(0, checkpoints + 1)
        def _(turn):
            own = turn == checkpoints
            number = row * checkpoints + jnp.minimum(turn, checkpoints - 1)
            until = checkpoint_lengths[number] - chunk * CHUNK

            @pl.when(own | ((until > 0) & (until <= CHUNK)))
            def _():
                outs, states = _run(q, k, v, log_decay, beta, S, jnp.where(own, left, until))

                @pl.when(own)
                def _():
                    _store_outputs(outs, out)
                    S[...] = states

                @pl.when(jnp.logical_not(own))
                def _():
                    keep(states, checkpoint_slots[number])

    @pl.when((left <= CHUNK) & ((left > 0) | (chunk == 0)))
    def _():
        keep(S[...], write_slots[row])


def _load(state, S):
    for head in range(len(S)):
        S[head] = state[head].astype(jnp.float32).T


def _run(q, k, v, log_decay, beta, S, valid):
    """Outputs and next states of the first `valid` tokens."""
    _, value_dim, key_dim = S.shape
    split = lambda x, width: jnp.stack([x[:, i : i + width] for i in range(0, x.shape[1], width)])  # noqa: E731
    decays = split(log_decay, key_dim) if log_decay.shape[0] == CHUNK else log_decay[...]
    values, keys = split(v, value_dim), (split(q, key_dim), split(k, key_dim))
    return tpu_chunk.chunk(*keys, values, decays, beta[...], S[...], valid, q.dtype == jnp.float32)


def _store_outputs(outs, out):
    width = outs.shape[2]
    for head in range(len(outs)):
        out[:, head * width : (head + 1) * width] = outs[head]


def _store(states, target):
    for head in range(len(states)):
        target[head] = states[head].T.astype(target.dtype)
