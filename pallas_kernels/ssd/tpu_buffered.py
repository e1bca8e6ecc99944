"""Buffered decode of Mamba-2 on TPU: states are read at each step, and written at one in W.

A grid step takes one row and a block of its heads. The pipeline moves rings in and out: they are small beside a state.
States go out by a copy of their own, and only where a ring is full or a row forks; a pipelined output would be written
at each step.

The new token takes its place in the ring first, and is then a record like the others: W rows of channels along lanes,
scaled by their decays and by C . B, and summed. From the state comes h C, a sum along lanes as in a decode step.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.padding import masked
from pallas_kernels.ssd.tpu_decode import TILE, along_lanes, heads_per_block
from pallas_kernels.ssd.tpu_verify import accepts_shapes
from pallas_kernels.tpu_vectors import fold, spread, sums_of_later_rows

# States of one grid step.
BLOCK_BYTES = 1 << 21
# A ring is folded as one product of the matrix unit.
MAX_RING = 16


def accepts(x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array, state: Array, ring_B: Array, *_: Any):
    """Why the kernel cannot run these arguments of `buffered`, or None."""
    if ring_B.shape[2] > MAX_RING:
        return f"a ring of {ring_B.shape[2]} records is more than {MAX_RING}"
    return accepts_shapes(x.shape[2], x.shape[3], *B.shape[2:])


def buffered(
    x: Float[Array, "B 1 H P"],
    dt: Float[Array, "B 1 H"],
    A: Float[Array, " H"],
    B: Float[Array, "B 1 G N"],
    C: Float[Array, "B 1 G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    ring_B: Float[Array, "L S W G N"],
    ring_dt_x: Float[Array, "L S W H*P"],
    ring_log_decay: Float[Array, "L S W H"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    cursors: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array, Array]:
    """As `pallas_kernels.ssd.buffered.buffered`; `interpret` as of `pallas_call`."""
    batch, _, heads, head_dim = x.shape
    (groups, width), ring_size = B.shape[2:], ring_B.shape[2]
    size = heads_per_block(heads, groups, head_dim, width, BLOCK_BYTES)
    rings = ring_B, ring_dt_x, ring_log_decay

    def whole(*shape):
        return pl.BlockSpec((None, *shape), lambda row, block, *_: (row, 0, 0))

    def ring_blocks(which):
        def blocks(*shape):
            return pl.BlockSpec(
                (None, None, ring_size, *shape),
                lambda row, block, layer, *slots: (layer[0], slots[which][row], *(0,) * (len(shape) + 1)),
            )

        channels = pl.BlockSpec(
            (None, None, ring_size, size * head_dim),
            lambda row, block, layer, *slots: (layer[0], slots[which][row], 0, block),
        )
        return [blocks(groups, width), channels, blocks(heads)]

    # A block with dimensions left out could not be copied from.
    states = pl.BlockSpec(
        (1, 1, size * head_dim, width), lambda row, block, layer, read, *_: (layer[0], read[row], block, 0)
    )
    channels = pl.BlockSpec((None, 1, size * head_dim), lambda row, block, *_: (row, 0, block))
    new_B, dt = masked(lengths, B, dt)
    flat_x, log_decay = x.reshape(batch, 1, -1), dt * A.astype(jnp.float32)
    elements = batch * heads * head_dim * width
    flat = state.reshape(*state.shape[:2], heads * head_dim, width)
    out, flat, *new_rings = pl.pallas_call(
        functools.partial(_kernel, head_dim),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(batch, heads // size),
            in_specs=[
                whole(groups, width), whole(groups, width), channels, whole(1, heads), whole(1, heads),
                pl.BlockSpec((1, heads), lambda *_: (0, 0)), states, *ring_blocks(0),
            ],
            out_specs=[channels, pl.BlockSpec(memory_space=pl.ANY), *ring_blocks(1)],
            scratch_shapes=[pltpu.VMEM((size * head_dim, width), state.dtype), pltpu.SemaphoreType.DMA],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(flat_x.shape, jnp.float32),
            *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (flat, *rings)),
        ],
        input_output_aliases={11: 1, 12: 2, 13: 3, 14: 4},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=elements * 2 + 4 * ring_size * x.size,
            transcendentals=ring_size * x.size,
            bytes_accessed=(elements + elements // ring_size) * state.dtype.itemsize
            + sum(2 * batch * v.size // v.shape[0] // v.shape[1] * 4 for v in rings)
            + sum(v.size * v.dtype.itemsize for v in (C, new_B, x, dt, log_decay))
            + 4 * x.size,
        ),
        interpret=interpret,
        name="ssd_buffered",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(v.astype(jnp.int32) for v in (read_slots, write_slots, cursors, lengths)),
        C[:, 0].astype(jnp.float32),
        new_B[:, 0],
        flat_x,
        dt,
        log_decay,
        D.astype(jnp.float32)[None],
        flat,
        *rings,
    )  # fmt: skip
    return out.reshape(x.shape), flat.reshape(state.shape), *new_rings


def _kernel(
    head_dim, layer, read_slots, write_slots, cursors, lengths, C, B, x, dt, log_decay, D, state, ring_B, ring_dt_x,
    ring_log_decay, out, states, new_B, new_dt_x, new_log_decay, folded, semaphore,
):  # fmt: skip
    """Blocks: C, B [G, N]; x, out [1, heads P]; dt, log_decay, D [1, H]; state, folded [heads P, N]; rings [W, G, N],
    [W, heads P], [W, H]. `states` is whole."""
    row, block = pl.program_id(0), pl.program_id(1)
    slot, cursor = write_slots[row], cursors[row]
    full = (lengths[row] > 0) & (cursor == ring_B.shape[0] - 1)
    new_B[...] = _with_token(ring_B[...], B[...][None], cursor)
    new_log_decay[...] = _with_token(ring_log_decay[...], log_decay[...], cursor)
    h = state.at[0, 0]
    heads, size = len(folded) // head_dim, len(ring_B)
    parts = _parts(block, heads, head_dim, dt.shape[1], len(C))
    scalars = spread(jnp.concatenate([new_log_decay[...], dt[...], D[...]]), head_dim, block * heads, heads)
    decays, step, past = scalars[:size], scalars[size : size + 1], scalars[size + 1 :]
    inputs = jnp.where(lengths[row] > 0, x[...].astype(jnp.float32), 0)
    new_dt_x[...] = _with_token(ring_dt_x[...], step * inputs, cursor)
    later = sums_of_later_rows(decays)
    before = jnp.exp(later[:1] + decays[:1])
    for group, part in parts:
        read = C[pl.ds(group, 1), :]
        scores = (new_B[:, group, :] * read).sum(axis=1, keepdims=True)
        from_ring = (jnp.exp(later[:, part]) * scores * new_dt_x[:, part]).sum(axis=0, keepdims=True)
        for tile in range(part.start, part.stop, TILE):
            rows, within = slice(tile, tile + TILE), slice(tile - part.start, tile - part.start + TILE)
            seen = along_lanes((h[rows].astype(jnp.float32) * read).sum(axis=1, keepdims=True))
            out[:, rows] = before[:, rows] * seen + from_ring[:, within] + past[:, rows] * inputs[:, rows]

    def write(source):
        copy = pltpu.make_async_copy(
            source, states.at[layer[0], slot, pl.ds(block * len(folded), len(folded))], semaphore
        )
        copy.start()
        copy.wait()

    @pl.when(full)
    def _():
        for group, part in parts:
            new = fold(h[part].astype(jnp.float32), new_dt_x[:, part], new_B[:, group, :], decays[:, part])
            folded[part] = new.astype(folded.dtype)
        write(folded)

    @pl.when((read_slots[row] != slot) & jnp.logical_not(full))
    def _():
        write(h)


def _parts(block, heads, head_dim, all_heads, groups):
    """The groups of a block of heads, each with its part of the block's channels."""
    of_block = max(1, heads * groups // all_heads)
    first, each = jax.lax.div(block * heads * groups, all_heads), heads * head_dim // of_block
    return [(first + number, slice(number * each, (number + 1) * each)) for number in range(of_block)]


def _with_token(ring, record, cursor):
    """Float32 [W, ...] with the record behind the first `cursor` ones, and 0 behind it."""
    place = jax.lax.broadcasted_iota(jnp.int32, (len(ring), *(1,) * (ring.ndim - 1)), 0)
    return jnp.where(place == cursor, record, jnp.where(place < cursor, ring, 0))
