"""Draft tokens through Mamba-2 on TPU: each state is read once, and nothing of its size is written.

A grid step takes one row, all its tokens, and a block of its heads, whose channels lie side by side along lanes. C
meets the states in one product of the matrix unit a group; what is between the tokens is left to the vector unit. What
a head has one of (dt, its decay, D) is spread along its channels by a product with a 0/1 matrix. All arithmetic is
float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.padding import masked
from pallas_kernels.ssd.tpu_decode import TILE, groups_of_block, heads_per_block
from pallas_kernels.tpu_vectors import product, spread

# Work on pairs of tokens grows with their square, and is unrolled.
MAX_TOKENS = 16


def accepts(x: Array, dt: Array, A: Array, B: Array, *_: Any) -> str | None:
    """Why the kernel cannot run these arguments of `verify`, or None."""
    if x.shape[1] > MAX_TOKENS:
        return f"{x.shape[1]} draft tokens are more than {MAX_TOKENS}"
    return accepts_shapes(x.shape[2], x.shape[3], *B.shape[2:])


def accepts_shapes(heads: int, head_dim: int, groups: int, state_size: int) -> str | None:
    """Why the kernels on records cannot run such heads, or None."""
    if state_size % 128:
        return f"state_size {state_size} is not a multiple of 128"
    if heads // groups * head_dim % TILE:
        return f"{heads // groups} heads of {head_dim} a group are not a multiple of {TILE}"
    return None


def verify(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G N"],
    C: Float[Array, "B T G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array]:
    """As `pallas_kernels.ssd.verify.verify`; `interpret` as of `pallas_call`."""
    batch, tokens, heads, head_dim = x.shape
    groups, width = B.shape[2:]
    size = heads_per_block(heads, groups, head_dim, width)
    blocks = heads // size
    of_block, sharing = groups_of_block(size, heads, groups)

    def vectors(width, sharing=1):
        return pl.BlockSpec((None, tokens, width), lambda row, block, *_: (row, 0, block // sharing))

    def by_block(v):
        return v.reshape(batch, tokens, blocks, size).swapaxes(1, 2)

    B, dt = masked(lengths, B, dt)
    log_decay, flat_B = dt * A.astype(jnp.float32), B.reshape(batch, tokens, -1)
    flat_x = x.reshape(batch, tokens, -1)
    scalars = pl.BlockSpec((None, None, tokens, size), lambda row, block, *_: (row, block, 0, 0))
    out, dt_x = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, blocks),
            in_specs=[
                vectors(of_block * width, sharing),
                vectors(of_block * width, sharing),
                vectors(size * head_dim),
                scalars,
                scalars,
                pl.BlockSpec((None, 1, size), lambda row, block, *_: (block, 0, 0)),
                pl.BlockSpec(
                    (None, None, size * head_dim, width),
                    lambda row, block, layer, read, _: (layer[0], read[row], block, 0),
                ),
            ],
            out_specs=[vectors(size * head_dim)] * 2,
        ),
        out_shape=[jax.ShapeDtypeStruct(flat_x.shape, jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * x.size * (width + tokens),
            transcendentals=x.size * tokens,
            bytes_accessed=batch * heads * head_dim * width * state.dtype.itemsize
            + sum(v.size * v.dtype.itemsize for v in (flat_B, C, x, dt, log_decay))
            + 8 * x.size,
        ),
        interpret=interpret,
        name="ssd_verify",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(v.astype(jnp.int32) for v in (read_slots, lengths)),
        C.reshape(batch, tokens, -1),
        flat_B,
        flat_x,
        by_block(dt),
        by_block(log_decay),
        D.astype(jnp.float32).reshape(blocks, 1, size),
        state.reshape(*state.shape[:2], heads * head_dim, width),
    )
    return out.reshape(x.shape), B, dt_x, log_decay


def _kernel(layer, read_slots, lengths, C, B, x, dt, log_decay, D, state, out, dt_x):
    """Blocks: C, B [T, groups N]; x, out, dt_x [T, heads P]; dt, log_decay [T, heads]; D [1, heads];
    state [heads P, N]."""
    (rows, width), (tokens, heads) = state.shape, dt.shape
    groups = B.shape[1] // width
    valid = jax.lax.broadcasted_iota(jnp.int32, (tokens, 1), 0) < lengths[pl.program_id(0)]
    scalars = spread(jnp.concatenate([log_decay[...], dt[...], D[...]]), rows // heads, 0, heads)
    decays, steps, past = scalars[:tokens], scalars[tokens : 2 * tokens], scalars[2 * tokens :]
    inputs = jnp.where(valid, x[...].astype(jnp.float32), 0)
    dt_x[...] = steps * inputs
    for group in range(groups):
        part = slice(group * rows // groups, (group + 1) * rows // groups)
        read, written = (x[:, group * width : (group + 1) * width].astype(jnp.float32) for x in (C, B))
        seen = _attend(read, written, dt_x[:, part], decays[:, part], state[part].astype(jnp.float32))
        out[:, part] = seen + past[:, part] * inputs[:, part]


def _attend(
    C: Float[Array, "T N"],
    B: Float[Array, "T N"],
    dt_x: Float[Array, "T R"],
    log_decay: Float[Array, "T R"],
    h: Float[Array, "R N"],
) -> Float[Array, "T R"]:
    """What a group's tokens read of state and records; R channels of its heads."""
    row = jax.lax.broadcasted_iota(jnp.int32, (len(C), 1), 0)
    seen = product(C, h, (1, 1))
    # `sums` is the log of d(i, t) for all tokens t from i on.
    out, sums = jnp.zeros_like(dt_x), jnp.zeros_like(log_decay)
    for i in reversed(range(len(C))):
        scores = jnp.where(row >= i, (C * B[i : i + 1]).sum(axis=1, keepdims=True), 0)
        out = out + jnp.exp(sums) * scores * dt_x[i : i + 1]
        sums = jnp.where(row >= i, sums + log_decay[i : i + 1], 0)
    return out + jnp.exp(sums) * seen
