"""One token of the gated delta rule on TPU: states move from pool to VMEM and back once, and nothing else moves.

A grid step takes one row and a block of its value heads. The pipeline fetches the block from the row's read slot and
writes the new one to its write slot of the same array, so the pool is neither gathered from nor scattered to.

The next row's states are fetched while this row's are computed. That is why no row may write a slot that another row
reads. All arithmetic is float32 on the vector unit.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu_vectors import Columns, normalised

# States of one grid step. Four such blocks are in VMEM: two on their way in, two on their way out.
BLOCK_BYTES = 1 << 20


def accepts_widths(key_dim: int, value_dim: int) -> str | None:
    """Why the kernels on TPU cannot run heads of these widths, or None."""
    for name, width in (("key_head_dim", key_dim), ("value_head_dim", value_dim)):
        if width % 128:
            return f"{name} {width} is not a multiple of 128"
    return None


def heads_per_block(value_heads: int, groups: int, state_bytes: int) -> int:
    """Value heads of a grid step: as many whole groups as fit into `BLOCK_BYTES`, at least one; divides the heads."""
    key_heads = value_heads // groups
    fitting = [n for n in range(1, key_heads + 1) if key_heads % n == 0 and n * groups * state_bytes <= BLOCK_BYTES]
    return groups * max(fitting, default=1)


def decode(
    q: Float[Array, "B Hk dk"],
    k: Float[Array, "B Hk dk"],
    v: Float[Array, "B Hv dv"],
    log_decay: Float[Array, "B Hv"] | Float[Array, "B Hv dk"],
    beta: Float[Array, "B Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "L N Hv dk dv"]]:
    """One step; arguments as in `pallas_kernels.gated_delta.gated_delta`, without the axis of tokens."""
    batch, value_heads, value_dim = v.shape
    key_heads, key_dim = q.shape[1:]
    groups = value_heads // key_heads
    size = heads_per_block(value_heads, groups, key_dim * value_dim * state.dtype.itemsize)
    blocks = value_heads // size
    per_channel = log_decay.ndim == 3

    def vectors(heads, dim):
        return pl.BlockSpec((None, None, heads, dim), lambda row, block, *_: (row, block, 0, 0))

    scalars = pl.BlockSpec((None, None, 1, size), lambda row, block, *_: (row, block, 0, 0), memory_space=pltpu.SMEM)
    state_block = (None, None, size, key_dim, value_dim)
    in_slot = pl.BlockSpec(state_block, lambda row, block, layer, read, *_: (layer[0], read[row], block, 0, 0))
    out_slot = pl.BlockSpec(state_block, lambda row, block, layer, read, write, _: (layer[0], write[row], block, 0, 0))

    split = lambda x: x.reshape(batch, blocks, -1, x.shape[-1])  # noqa: E731
    split_scalars = lambda x: x.reshape(batch, blocks, 1, size).astype(jnp.float32)  # noqa: E731
    states = batch * value_heads
    out, state = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, blocks),
            in_specs=[
                vectors(size // groups, key_dim),
                vectors(size // groups, key_dim),
                vectors(size, value_dim),
                vectors(size, key_dim) if per_channel else scalars,
                scalars,
                in_slot,
            ],
            out_specs=[vectors(size, value_dim), out_slot],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, blocks, size, value_dim), jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={9: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=states * 7 * key_dim * value_dim,
            transcendentals=states * (key_dim if per_channel else 1),
            bytes_accessed=2 * states * key_dim * value_dim * state.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for x in (q, k, v, log_decay, beta))
            + v.size * 4,
        ),
        interpret=interpret,
        name="gated_delta_decode",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(x.astype(jnp.int32) for x in (read_slots, write_slots, lengths)),
        *map(split, (q, k, v)),
        split(log_decay) if per_channel else split_scalars(log_decay),
        split_scalars(beta),
        state,
    )
    return out.reshape(v.shape), state


def _kernel(layer, read_slots, write_slots, lengths, q, k, v, log_decay, beta, state, out, new_state):
    """Blocks: q, k [hk, dk]; v, out [hv, dv]; log_decay [hv, dk] or [1, hv]; beta [1, hv]; states [hv, dk, dv]."""
    heads, value_dim = v.shape
    groups = heads // k.shape[0]
    per_channel = log_decay.shape == (heads, k.shape[1])
    valid = lengths[pl.program_id(0)] > 0

    @pl.when(valid)
    def _():
        values = v[...].astype(jnp.float32)
        queries = normalised(q[...]).T * k.shape[1] ** -0.5
        rows = [normalised(k[...])]
        if per_channel:
            rows.append(jnp.exp(log_decay[...].astype(jnp.float32)))
        columns = Columns(rows, value_dim)
        for head in range(heads):
            key_head = head // groups
            if per_channel:
                key, decay = columns(key_head, head)
            else:
                (key,) = columns(key_head)
                decay = jnp.exp(jnp.full((1, value_dim), log_decay[0, head]))
            S = decay * state[head].astype(jnp.float32)
            u = beta[0, head] * (values[head : head + 1] - (key * S).sum(axis=0, keepdims=True))
            S = S + key * u
            new_state[head] = S.astype(new_state.dtype)
            out[head : head + 1] = (queries[:, key_head : key_head + 1] * S).sum(axis=0, keepdims=True)

    @pl.when(jnp.logical_not(valid))
    def _():
        out[...] = jnp.zeros_like(out)

        @pl.loop(0, heads)
        def _(head):
            new_state[head] = state[head]
