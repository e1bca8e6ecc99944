"""Update records folded into states on TPU: each state is read and written once, whatever the number of records.

The grid is rows x blocks of value heads x chunks of records, chunks innermost; chunks beyond a row's accepted records
are neither fetched nor computed. A chunk's outer products with their decays are one product of the matrix unit a head:
float32 numbers are sums of bfloat16 ones, and there is room for those in a product over so few records.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.tpu_decode import accepts_widths, heads_per_block
from pallas_kernels.tpu_vectors import fold

CHUNK = 16


def accepts(k: Array, u: Array, *_: Any) -> str | None:
    """Why the kernel cannot run these arguments of `replay`, or None."""
    return accepts_widths(k.shape[3], u.shape[3])


def replay(
    k: Float[Array, "B T Hk dk"],
    u: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    accepted: Int[Array, " B"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> Float[Array, "L N Hv dk dv"]:
    """As `pallas_kernels.gated_delta.replay.replay`; `interpret` as of `pallas_call`."""
    batch, tokens, value_heads, value_dim = u.shape
    key_dim = k.shape[3]
    groups = value_heads // k.shape[2]
    size = heads_per_block(value_heads, groups, key_dim * value_dim * state.dtype.itemsize)
    blocks, chunk = value_heads // size, min(tokens, CHUNK)
    per_channel = log_decay.ndim == 4

    def place(row, chunk_number, accepted):
        return jnp.minimum(chunk_number, jax.lax.div(jnp.maximum(accepted[row] - 1, 0), chunk))

    def vectors(width):
        """Of a chunk's records and a block's heads, side by side: [C, heads * width of one]."""
        return pl.BlockSpec(
            (None, chunk, width),
            lambda row, block, number, layer, read, write, accepted: (row, place(row, number, accepted), block),
        )

    scalars = pl.BlockSpec(
        (None, None, chunk, size),
        lambda row, block, number, layer, read, write, accepted: (row, block, place(row, number, accepted), 0),
    )

    def slot(which):
        return pl.BlockSpec(
            (None, None, size, key_dim, value_dim),
            lambda row, block, number, layer, *slots: (layer[0], slots[which][row], block, 0, 0),
        )

    flat = lambda x: x.reshape(batch, tokens, -1)  # noqa: E731
    by_block = log_decay.reshape(batch, tokens, blocks, -1).swapaxes(1, 2)
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, blocks, pl.cdiv(tokens, chunk)),
            in_specs=[
                vectors(size // groups * key_dim),
                vectors(size * value_dim),
                vectors(size * key_dim) if per_channel else scalars,
                slot(0),
            ],
            out_specs=slot(1),
        ),
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * u.size * key_dim,
            transcendentals=log_decay.size,
            bytes_accessed=2 * batch * value_heads * key_dim * value_dim * state.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for x in (k, u, log_decay)),
        ),
        interpret=interpret,
        name="gated_delta_replay",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(x.astype(jnp.int32) for x in (read_slots, write_slots, accepted)),
        flat(k),
        flat(u),
        flat(log_decay) if per_channel else by_block,
        state,
    )


def _kernel(layer, read_slots, write_slots, accepted, k, u, log_decay, state, new_state):
    """Blocks: k [C, hk dk]; u [C, hv dv]; log_decay [C, hv dk] or [C, hv]; states [hv, dk, dv]."""
    heads, key_dim, value_dim = state.shape
    groups = heads * key_dim // k.shape[1]
    number = pl.program_id(2)
    left = accepted[pl.program_id(0)] - number * len(u)
    valid = jax.lax.broadcasted_iota(jnp.int32, (len(u), 1), 0) < left

    def rows(x, width, head):
        return jnp.where(valid, x[:, head * width : (head + 1) * width], 0)

    def fold_into(source):
        for head in range(heads):
            decays = rows(log_decay, log_decay.shape[1] // heads, head)
            keys, updates = rows(k, key_dim, head // groups), rows(u, value_dim, head)
            S = fold(source[head].astype(jnp.float32), keys, updates, decays)
            new_state[head] = S.astype(new_state.dtype)

    @pl.when((left > 0) & (number == 0))
    def _():
        fold_into(state)

    @pl.when((left > 0) & (number > 0))
    def _():
        fold_into(new_state)

    @pl.when((left <= 0) & (number == 0))
    def _():
        @pl.loop(0, heads)
        def _(head):
            new_state[head] = state[head]
