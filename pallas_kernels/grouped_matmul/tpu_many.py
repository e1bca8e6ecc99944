"""Experts of many tokens on TPU: rows are sorted by expert by XLA, each expert's padded to whole tiles, and what the
kernel makes of them is put together by XLA again."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul.grouping import Grouping, combine, most_tiles
from pallas_kernels.grouped_matmul.tpu_expert import VMEM_BYTES, Experts


def mixture(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    here: Bool[Array, "N k"],
    grouping: Grouping,
    experts: Experts,
    layer: Int[Array, ""],
    interpret: Any,
) -> Float[Array, "N D"]:
    """Each token's weighted sum of its experts' outputs, float32; assignments not `here` add nothing."""
    count = grouping.sizes.shape[0]
    rows, block = experts.tiling(expert_ids.size)
    tiles = most_tiles(expert_ids.size, count, rows)
    expert_tiles = -(-grouping.sizes // rows)
    tile_ends = jnp.cumsum(expert_tiles)
    starts = jnp.cumsum(grouping.sizes) - grouping.sizes
    # How far an expert's rows move, from the sorted ones to the padded.
    shift = (tile_ends - expert_tiles) * rows - starts
    expert_of_tile = jnp.minimum(jnp.searchsorted(tile_ends, jnp.arange(tiles), side="right"), count - 1)
    source = jnp.arange(tiles * rows) - jnp.repeat(shift[expert_of_tile], rows)
    # Rows that fill up a tile hold any token; nothing reads what becomes of them.
    tokens = grouping.tokens[jnp.clip(source, 0, expert_ids.size - 1)]
    products = _products(x[tokens], experts, expert_of_tile, tile_ends[-1], layer, (rows, block), interpret)
    places = grouping.places + shift[jnp.clip(expert_ids, 0, count - 1)]
    return combine(products, places, here, weights)


def _products(
    rows: Float[Array, "M D"],
    experts: Experts,
    expert_of_tile: Int[Array, " tiles"],
    used_tiles: Int[Array, ""],
    layer: Int[Array, ""],
    blocks: tuple[int, int],
    interpret: Any,
) -> Float[Array, "M D"]:
    """Every padded row through its tile's expert, in blocks of rows and inner channels; unused tiles hold anything."""
    (tile, block), (inner, width) = blocks, experts.up.shape[2:]
    row_block = pl.BlockSpec((tile, width), lambda t, *_: (t, 0))
    arguments, specs = zip(*experts.operands(block), strict=True)

    def kernel(layer, expert_of_tile, rows, *refs):
        """Blocks: rows, out, total [M, D]; and of `Experts.operands`."""
        *operands, out, total = refs
        experts.accumulate(rows[...], operands, total)

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            out[...] = total[...].astype(out.dtype)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(used_tiles, pl.cdiv(inner, block)),
            in_specs=[row_block, *specs],
            out_specs=row_block,
            scratch_shapes=[pltpu.VMEM((tile, width), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=experts.cost(len(expert_of_tile), rows.shape[0], 2 * rows.size * rows.dtype.itemsize),
        interpret=interpret,
        name="routed_experts",
    )(layer.reshape(1), expert_of_tile, rows, *arguments)
