"""Chunks of tokens through Mamba-2 on TPU, with the state in VMEM from the first chunk to the last.

The grid is rows x blocks of heads x chunks, chunks innermost. A row's states are fetched from its read slot at its
first chunk and go to its write slot after its last; in between they stay where they are, transposed, so that decays run
along lanes. Chunks beyond a row's length are neither fetched nor computed.

Products take bfloat16 factors where x came as bfloat16, else float32 ones; sums and states are float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tpu_sums
from pallas_kernels.ssd import tpu_checkpoints, tpu_chunk
from pallas_kernels.ssd.tpu_decode import groups_of_block
from pallas_kernels.tpu_sums import CHUNK, LANES

# States of one grid step, in and out, are in VMEM twice each, and once more to be computed on.
BLOCK_BYTES = 1 << 20


def heads_per_block(heads: int, groups: int, head_dim: int, state_size: int, itemsize: int) -> int:
    """Heads of a grid step: an even number, whole groups or a part of one.

    As many as fit into `BLOCK_BYTES`, and as one product can spread the decays of. Float32 inputs, of `itemsize` 4,
    take twice the room.
    """
    group = heads // groups
    fitting = [
        n for n in range(2, heads + 1, 2)
        if heads % n == 0 and (n % group == 0 or group % n == 0)
        and n * head_dim * state_size * 2 * itemsize <= BLOCK_BYTES and n * tpu_sums.parts(itemsize == 4) <= LANES
    ]  # fmt: skip
    return max(fitting, default=heads)


def prefill(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G N"],
    C: Float[Array, "B T G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    checkpoints: tuple[Int[Array, "B M"], Int[Array, "B M"]] | None = None,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H P"], Float[Array, "L S H P N"]]:
    """Arguments and result as in `pallas_kernels.ssd.ssd`; `checkpoints` are lengths and slots, `interpret` as of
    `pallas_call`."""
    batch, tokens, heads, head_dim = x.shape
    groups, width = B.shape[2:]
    size = heads_per_block(heads, groups, head_dim, width, x.dtype.itemsize)
    blocks, chunks, pairs = heads // size, pl.cdiv(tokens, CHUNK), size // 2
    of_block, sharing = groups_of_block(size, heads, groups)
    # A last chunk that is not full reaches beyond the arrays; only a block must not be larger than its array.
    padded_tokens = max(tokens, CHUNK)

    def current(chunk, lengths, row):
        """The chunk, or the row's last one."""
        return jnp.minimum(chunk, jax.lax.div(jnp.maximum(lengths[row] - 1, 0), CHUNK))

    def vectors(width, sharing):
        """Of a chunk's tokens and a block's heads or groups, side by side."""
        return pl.BlockSpec(
            (None, CHUNK, width),
            lambda row, block, chunk, layer, read, write, lengths, *_: (
                row,
                current(chunk, lengths, row),
                block // sharing,
            ),
        )

    def steps(of):
        """Of the chunk number of(chunk), and of its neighbour: all lanes of a register."""
        return pl.BlockSpec(
            (None, size, LANES),
            lambda row, block, chunk, layer, read, write, lengths, *_: (
                row, block, current(of(chunk), lengths, row) // (LANES // CHUNK)
            ),
        )  # fmt: skip

    by_head = pl.BlockSpec((None, pairs, LANES), lambda row, block, *_: (block, 0, 0))
    exact = x.dtype == jnp.float32
    ones, selector = tpu_sums.constants(pairs, 2 * head_dim, exact)
    whole = [pl.BlockSpec(v.shape, lambda *_: (0, 0)) for v in (ones, selector)]

    def slot(which):
        return pl.BlockSpec(
            (None, None, size * head_dim, width),
            lambda row, block, chunk, layer, *slots: (layer[0], slots[which][row], block, 0),
        )

    def flat(v):
        return jnp.pad(v.reshape(batch, tokens, -1), [(0, 0), (0, padded_tokens - tokens), (0, 0)])

    def by_pair(v):
        """[blocks, pairs, LANES] of a number for each head."""
        return jnp.repeat(v.astype(jnp.float32), CHUNK).reshape(blocks, pairs, LANES)

    dt = jnp.pad(dt.astype(jnp.float32), [(0, 0), (0, -tokens % LANES), (0, 0)]).swapaxes(1, 2)
    states = state.reshape(*state.shape[:2], heads * head_dim, width)
    kernel: Callable[..., None] = _kernel
    targets: list[Array] = []
    own_dt: list[Array] = []
    out_slot, kept = slot(1), []
    if checkpoints is not None:
        # The states of a row go to several slots: by copies rather than as an output's blocks.
        kernel = functools.partial(tpu_checkpoints.kernel, _kernel, checkpoints[0].shape[1])
        targets, own_dt = [v.reshape(-1) for v in checkpoints], [dt]
        out_slot = pl.BlockSpec(memory_space=pl.ANY)
        kept = [pltpu.VMEM((size * head_dim, width), state.dtype), pltpu.SemaphoreType.DMA]
    moved = 2 * batch + sum(v.size for v in targets[:1])  # states, in or out
    out, states = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4 + len(targets),
            grid=(batch, blocks, chunks),
            in_specs=[
                *(steps(lambda chunk: chunk) for _ in own_dt),
                vectors(size * head_dim, 1),
                steps(lambda _: 0),
                steps(lambda chunk: chunk + 1),
                by_head,
                vectors(of_block * width, sharing),
                vectors(of_block * width, sharing),
                by_head,
                *whole,
                slot(0),
            ],
            out_specs=[vectors(size * head_dim, 1), out_slot],
            scratch_shapes=[
                pltpu.VMEM((pairs, width, 2 * head_dim), jnp.float32),
                *tpu_sums.scratch(pairs, 2 * head_dim, exact),
                *kept,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, padded_tokens, heads * head_dim), jnp.float32),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        input_output_aliases={13 + len(targets) + len(own_dt): 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * x.size * (CHUNK + 2 * width),
            transcendentals=dt.size * 2 * CHUNK,
            bytes_accessed=moved * heads * head_dim * width * state.dtype.itemsize
            + sum(v.size * v.dtype.itemsize for v in (x, dt, B, C))
            + x.size * 4,
        ),
        interpret=interpret,
        name="ssd_prefill",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(v.astype(jnp.int32) for v in (read_slots, write_slots, lengths, *targets)),
        *own_dt,
        flat(x),
        dt,
        dt,
        by_pair(A),
        flat(B),
        flat(C),
        by_pair(D),
        ones,
        selector,
        states,
    )
    return out[:, :tokens].reshape(x.shape), states.reshape(state.shape)


def _kernel(
    layer,
    read_slots,
    write_slots,
    lengths,
    x,
    first_dt,
    next_dt,
    A,
    B,
    C,
    D,
    ones,
    selector,
    state,
    out,
    new_state,
    h,
    *sums,
):
    """Blocks: x, out [CHUNK, heads P]; dt [heads, LANES]; A, D [pairs, LANES]; B, C [CHUNK, groups N]; states
    [heads P, N]; h [pairs, N, 2 P]; sums as `tpu_sums.Sums`."""
    pairs, lanes = h.shape[0], h.shape[2]
    chunk = pl.program_id(2)
    left = lengths[pl.program_id(0)] - chunk * CHUNK

    def sums_of(dt, chunk, left):
        steps = jnp.where(tpu_sums.valid_lanes(left), tpu_sums.by_pair(dt, chunk), 0)
        return tpu_sums.compute(steps * A[...], steps, ones[...], x.dtype == jnp.float32)

    def keep(values):
        for reference, value in zip(sums, values, strict=True):
            reference[...] = value

    @pl.when(chunk == 0)
    def _():
        for pair in range(pairs):
            h[pair] = state[pair * lanes : (pair + 1) * lanes].astype(jnp.float32).T
        keep(sums_of(first_dt, chunk, left))

    @pl.when(left > 0)
    def _():
        # The next chunk's sums are made while this chunk's products are under way.
        following = sums_of(next_dt, chunk + 1, left - CHUNK)
        tpu_chunk.chunk(tpu_chunk.Block(x, B, C, D, h, out, left), tpu_sums.Sums(selector[...], *sums))
        keep(following)

    @pl.when((left <= CHUNK) & ((left > 0) | (chunk == 0)))
    def _():
        for pair in range(pairs):
            new_state[pair * lanes : (pair + 1) * lanes] = h[pair].T.astype(new_state.dtype)
