"""Experts of few tokens on TPU: the tokens stay in VMEM, where the kernel takes each expert's rows out of them and adds
what becomes of them to its tokens' sums.

XLA would write every expert's rows to memory, filled up to a tile of 16 where one or two are real, and read and write
as much again for their outputs: an eighth of what Qwen3-Next's experts move for 64 tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.grouping import Grouping, tiles_by_expert
from pallas_kernels.grouped_matmul.tpu_expert import VMEM_BYTES, Experts

# Of the tokens: they and their sums twice each, in the pipeline, and they in float32, whose rows can be told apart.
_MOST_BYTES = 12 << 20


def fits(x: Float[Array, "N D"]) -> bool:
    """Whether the tokens can stay in VMEM beside the weights."""
    return x.size * (2 * x.dtype.itemsize + 12) <= _MOST_BYTES


def mixture(
    x: Float[Array, "N D"],
    weights: Float[Array, "N k"],
    grouping: Grouping,
    experts: Experts,
    layer: Int[Array, ""],
    interpret: Any,
) -> Float[Array, "N D"]:
    """Each token's weighted sum of its experts' outputs, float32, of the assignments in the grouping's sizes."""
    (tokens, width), inner = x.shape, experts.up.shape[2]
    rows, block = experts.tiling(weights.size)
    tiles = tiles_by_expert(grouping, rows)
    factors = jnp.zeros(weights.size, jnp.float32).at[grouping.places.ravel()].set(weights.ravel())
    # The first tile clears the sums, even if no expert has a row.
    used = jnp.maximum((tiles.ends > tiles.firsts).sum(), 1)
    whole = pl.BlockSpec((tokens, width), lambda *_: (0, 0))
    arguments, specs = zip(*experts.operands(block), strict=True)

    def kernel(layer, expert, firsts, ends, token_of, factor_of, x, *refs):
        """Blocks: x, out, x32 [N, D]; chosen, total [M, D]; and of `Experts.operands`."""
        *operands, out, x32, chosen, total = refs
        tile, part = pl.program_id(0), pl.program_id(1)
        first = firsts[tile]
        count = jnp.minimum(ends[tile] - first, rows)

        def each_row(work):
            jax.lax.fori_loop(0, count, lambda row, _: work(pl.ds(row, 1), first + row), None)

        def take(row, assignment):
            chosen[row] = x32[pl.ds(token_of[assignment], 1)]

        def give(row, assignment):
            out[pl.ds(token_of[assignment], 1)] += factor_of[assignment] * total[row]

        @pl.when((tile == 0) & (part == 0))
        def _():
            out[...] = jnp.zeros_like(out)
            x32[...] = x[...].astype(jnp.float32)

        @pl.when(part == 0)
        def _():
            each_row(take)

        experts.accumulate(chosen[...].astype(x.dtype), operands, total)

        @pl.when(part == pl.num_programs(1) - 1)
        def _():
            each_row(give)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(used, pl.cdiv(inner, block)),
            in_specs=[whole, *specs],
            out_specs=whole,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in (x.shape, (rows, width), (rows, width))],
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=experts.cost(len(tiles.experts), weights.size, x.size * (x.dtype.itemsize + 4)),
        interpret=interpret,
        name="routed_experts",
    )(layer.reshape(1), tiles.experts, tiles.firsts, tiles.ends, grouping.tokens, factors, x, *arguments)
