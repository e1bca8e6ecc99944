"""One token of Mamba-2 on TPU: states move from pool to VMEM and back once, and nothing else of size moves.

A grid step takes one row and a block of its heads. The pipeline fetches the block from the row's read slot and writes
the new one to its write slot of the same array, so the pool is neither gathered from nor scattered to. The next row's
states are fetched while this row's are computed. That is why no row may write a slot that another row reads.

The rows of a block's states, heads x P of N numbers each, are worked on 128 at a time. What is added, dt x B^T, has x
along sublanes. The permute unit would take longer to spread it along lanes than the states take to arrive, so the
matrix unit makes the outer product, in full: a float32 number is a sum of three bfloat16 ones. The permute unit then
has the time for what is read, h C, a sum along lanes. All of it is float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu_vectors import bfloat16_parts

# States of one grid step. Four such blocks are in VMEM: two on their way in, two on their way out.
BLOCK_BYTES = 1 << 20
# Rows of states that are worked on together; their outputs lie along lanes.
TILE = 128


def heads_per_block(heads: int, groups: int, head_dim: int, state_size: int, block_bytes: int | None = None) -> int:
    """Heads of a grid step: as many as fit into the bytes (`BLOCK_BYTES`), whole tiles, and whole groups or a part of
    one."""
    group = heads // groups
    fitting = [
        n for n in range(1, heads + 1)
        if heads % n == 0 and (n % group == 0 or group % n == 0) and n * head_dim % TILE == 0
    ]  # fmt: skip
    most = block_bytes or BLOCK_BYTES
    return max((n for n in fitting if n * head_dim * state_size * 4 <= most), default=min(fitting))


def groups_of_block(size: int, heads: int, groups: int) -> tuple[int, int]:
    """Groups of a block of `size` heads, and how many blocks share one where a block is part of a group."""
    return max(1, size * groups // heads), max(1, heads // groups // size)


def decode(
    x: Float[Array, "B H P"],
    dt: Float[Array, "B H"],
    A: Float[Array, " H"],
    B: Float[Array, "B G N"],
    C: Float[Array, "B G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "B H P"], Float[Array, "L S H P N"]]:
    """One step; arguments as in `pallas_kernels.ssd.ssd`, without the axis of tokens."""
    batch, heads, head_dim = x.shape
    groups, width = B.shape[1:]
    size = heads_per_block(heads, groups, head_dim, width)
    blocks, tiles = heads // size, size * head_dim // TILE
    of_block, sharing = groups_of_block(size, heads, groups)

    # Rows of padding decay by 1 and add 0. The compiler fuses this into what lays x out for the kernel.
    valid, x = lengths[:, None] > 0, x.astype(jnp.float32)
    dt = jnp.where(valid, dt.astype(jnp.float32), 0)
    update = jnp.where(valid[..., None], dt[..., None] * x, 0).reshape(batch, blocks, tiles, TILE)
    decay = jnp.exp(dt * A).reshape(batch, blocks, 1, size)
    B = jnp.where(valid[..., None], B.astype(jnp.float32), 0)

    rows = pl.BlockSpec((None, None, tiles, TILE), lambda row, block, *_: (row, block, 0, 0))
    scalars = pl.BlockSpec((None, None, 1, size), lambda row, block, *_: (row, block, 0, 0), memory_space=pltpu.SMEM)
    vectors = pl.BlockSpec((None, None, of_block, width), lambda row, block, *_: (row, block // sharing, 0, 0))

    def slot(which):
        return pl.BlockSpec(
            (None, None, size * head_dim, width),
            lambda row, block, layer, *slots: (layer[0], slots[which][row], block, 0),
        )

    flat = state.reshape(*state.shape[:2], heads * head_dim, width)
    out, flat = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, blocks),
            in_specs=[rows, scalars, vectors, vectors, slot(0)],
            out_specs=[rows, slot(1)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(update.shape, jnp.float32),
            jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        ],
        input_output_aliases={7: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=5 * x.size * width,
            transcendentals=0,
            bytes_accessed=2 * x.size * width * state.dtype.itemsize
            + 4 * (2 * x.size + decay.size + B.size)
            + C.size * C.dtype.itemsize,
        ),
        interpret=interpret,
        name="ssd_decode",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(v.astype(jnp.int32) for v in (read_slots, write_slots)),
        update,
        decay,
        *(v.reshape(batch, groups // of_block, of_block, width) for v in (B, C)),
        flat,
    )
    return out.reshape(x.shape) + D[:, None] * x, flat.reshape(state.shape)


def _kernel(layer, read_slots, write_slots, update, decay, B, C, state, out, new_state):
    """Blocks: update, out [tiles, TILE]; decay [1, heads]; B, C [groups, N]; states [heads P, N]."""
    tiles, groups = update.shape[0], B.shape[0]
    per_tile = max(1, decay.shape[1] // tiles)  # heads of a tile; a head may have several tiles

    def decays(tile, axis):
        """Of a tile's heads, along the rows of their states or along their outputs' lanes."""
        scales = [decay[0, tile * decay.shape[1] // tiles + n] for n in range(per_tile)]
        shape = (TILE // per_tile, 1) if axis == 0 else (1, TILE // per_tile)
        return jnp.concatenate([jnp.full(shape, scale) for scale in scales], axis=axis)

    written, read = (v[...].astype(jnp.float32) for v in (B, C))
    overlaps = (written * read).sum(axis=1, keepdims=True)
    outer = _OuterProducts(update[...], written)
    for tile in range(tiles):
        rows, group = slice(tile * TILE, (tile + 1) * TILE), tile * groups // tiles
        h = decays(tile, 0) * state[rows].astype(jnp.float32) + outer(tile, group)
        new_state[rows] = h.astype(new_state.dtype)
    for tile in range(tiles):
        rows, group = slice(tile * TILE, (tile + 1) * TILE), slice(tile * groups // tiles, tile * groups // tiles + 1)
        # From the state before the update: this need not wait for the products.
        seen = along_lanes((state[rows].astype(jnp.float32) * read[group]).sum(axis=1, keepdims=True))
        out[tile : tile + 1] = decays(tile, 1) * seen + overlaps[group] * update[tile : tile + 1]


class _OuterProducts:
    """Of each row of one array and each row of another."""

    def __init__(self, x: Float[Array, "n TILE"], other: Float[Array, "m N"]) -> None:
        high, middle, low = bfloat16_parts(x)
        # All products of two parts that float32 can tell from 0.
        self._columns = jnp.concatenate([high, high, high, middle, middle, low]).T.astype(jnp.bfloat16)
        self._row = jax.lax.broadcasted_iota(jnp.int32, self._columns.shape, 1) % len(x)
        self._others, self._count = bfloat16_parts(other), len(x)

    def __call__(self, row: int, other: int) -> Float[Array, "TILE N"]:
        parts = (part[other : other + 1] for part in self._others)
        high, middle, low = (jnp.broadcast_to(part, (self._count, part.shape[1])) for part in parts)
        weights = jnp.concatenate([high, middle, low, high, middle, high]).astype(jnp.bfloat16)
        column = jnp.where(self._row == row, self._columns, 0)
        return jnp.dot(column, weights, preferred_element_type=jnp.float32)


def along_lanes(column: Float[Array, "TILE 1"]) -> Float[Array, "1 TILE"]:
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), axis) for axis in (0, 1))
    return jnp.where(row == lane, column, 0).sum(axis=0, keepdims=True)
