"""Update records folded into Mamba-2's states on TPU: each state is read and written once, for any number of records.

The grid is rows x blocks of heads x chunks of records, chunks innermost; chunks beyond a row's accepted records are
neither fetched nor computed. A chunk's outer products with their decays are one product of the matrix unit a group.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.ssd.tpu_decode import groups_of_block, heads_per_block
from pallas_kernels.ssd.tpu_verify import accepts_shapes
from pallas_kernels.tpu_vectors import fold, spread

CHUNK = 16


def accepts(B: Array, dt_x: Array, log_decay: Array, accepted: Array, state: Array, *_: Any) -> str | None:
    """Why the kernel cannot run these arguments of `replay`, or None."""
    return accepts_shapes(*state.shape[2:4], *B.shape[2:])


def replay(
    B: Float[Array, "B T G N"],
    dt_x: Float[Array, "B T H*P"],
    log_decay: Float[Array, "B T H"],
    accepted: Int[Array, " B"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> Float[Array, "L S H P N"]:
    """As `pallas_kernels.ssd.replay.replay`; `interpret` as of `pallas_call`."""
    (batch, tokens, groups, width), (heads, head_dim) = B.shape, state.shape[2:4]
    size = heads_per_block(heads, groups, head_dim, width)
    blocks, chunk = heads // size, min(tokens, CHUNK)
    of_block, sharing = groups_of_block(size, heads, groups)

    def place(row, number, accepted):
        return jnp.minimum(number, jax.lax.div(jnp.maximum(accepted[row] - 1, 0), chunk))

    def vectors(width, sharing=1):
        return pl.BlockSpec(
            (None, chunk, width),
            lambda row, block, number, layer, read, write, accepted: (
                row, place(row, number, accepted), block // sharing
            ),
        )  # fmt: skip

    def slot(which):
        return pl.BlockSpec(
            (None, None, size * head_dim, width),
            lambda row, block, number, layer, *slots: (layer[0], slots[which][row], block, 0),
        )

    by_block = pl.BlockSpec(
        (None, None, chunk, size),
        lambda row, block, number, layer, read, write, accepted: (row, block, place(row, number, accepted), 0),
    )
    states = state.reshape(*state.shape[:2], heads * head_dim, width)
    states = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, blocks, pl.cdiv(tokens, chunk)),
            in_specs=[vectors(of_block * width, sharing), vectors(size * head_dim), by_block, slot(0)],
            out_specs=slot(1),
        ),
        out_shape=jax.ShapeDtypeStruct(states.shape, states.dtype),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * dt_x.size * width,
            transcendentals=dt_x.size,
            bytes_accessed=2 * batch * heads * head_dim * width * state.dtype.itemsize
            + sum(v.size * v.dtype.itemsize for v in (B, dt_x, log_decay)),
        ),
        interpret=interpret,
        name="ssd_replay",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(v.astype(jnp.int32) for v in (read_slots, write_slots, accepted)),
        B.reshape(batch, tokens, -1),
        dt_x,
        log_decay.reshape(batch, tokens, blocks, size).swapaxes(1, 2),
        states,
    )
    return states.reshape(state.shape)


def _kernel(layer, read_slots, write_slots, accepted, B, dt_x, log_decay, state, new_state):
    """Blocks: B [C, groups N]; dt_x [C, heads P]; log_decay [C, heads]; states [heads P, N]."""
    (rows, width), heads = state.shape, log_decay.shape[1]
    groups, number = B.shape[1] // width, pl.program_id(2)
    left = accepted[pl.program_id(0)] - number * len(B)
    valid = jax.lax.broadcasted_iota(jnp.int32, (len(B), 1), 0) < left

    def fold_into(source):
        decays = spread(jnp.where(valid, log_decay[...], 0), rows // heads, 0, heads)
        for group in range(groups):
            part = slice(group * rows // groups, (group + 1) * rows // groups)
            added, written = (
                jnp.where(valid, x, 0) for x in (dt_x[:, part], B[:, group * width : (group + 1) * width])
            )
            h = fold(source[part].astype(jnp.float32), added, written, decays[:, part])
            new_state[part] = h.astype(new_state.dtype)

    @pl.when((left > 0) & (number == 0))
    def _():
        fold_into(state)

    @pl.when((left > 0) & (number > 0))
    def _():
        fold_into(new_state)

    @pl.when((left <= 0) & (number == 0))
    def _():
        new_state[...] = state[...]
