"""Draft tokens through the gated delta rule on TPU: each state is read once, and nothing of its size is written.

A grid step takes one row, all its tokens, and a block of its value heads. The states meet the tokens in one product of
the matrix unit a head. What is between the tokens, a few numbers for each pair, is left to the vector unit, and the
triangular system is solved row by row: for so few tokens, products of small matrices would take longer.

All arithmetic is float32: the records have to be as good as those of a decode step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.tpu_decode import accepts_widths, heads_per_block
from pallas_kernels.padding import masked
from pallas_kernels.tpu_vectors import for_value_heads, normalised, product

# Work on pairs of tokens grows with their square, and is unrolled.
MAX_TOKENS = 16


def accepts(q: Array, k: Array, v: Array, *_: Any) -> str | None:
    """Why the kernel cannot run these arguments of `verify`, or None."""
    if refusal := accepts_widths(q.shape[3], v.shape[3]):
        return refusal
    if q.shape[1] > MAX_TOKENS:
        return f"{q.shape[1]} draft tokens are more than {MAX_TOKENS}"
    return None


def verify(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array]:
    """As `pallas_kernels.gated_delta.verify.verify`; `interpret` as of `pallas_call`."""
    batch, tokens, value_heads, value_dim = v.shape
    key_dim = q.shape[3]
    groups = value_heads // q.shape[2]
    size = heads_per_block(value_heads, groups, key_dim * value_dim * state.dtype.itemsize)
    blocks = value_heads // size
    per_channel = log_decay.ndim == 4

    def vectors(width):
        """Of a row's tokens and a block's heads, side by side: [T, heads * width of one]."""
        return pl.BlockSpec((None, tokens, width), lambda row, block, *_: (row, 0, block))

    scalars = pl.BlockSpec((None, None, tokens, size), lambda row, block, *_: (row, block, 0, 0))
    states = pl.BlockSpec(
        (None, None, size, key_dim, value_dim), lambda row, block, layer, read, _: (layer[0], read[row], block, 0, 0)
    )

    def by_block(x):
        return x.astype(jnp.float32).reshape(batch, tokens, blocks, size).swapaxes(1, 2)

    flat = lambda x: x.reshape(batch, tokens, -1)  # noqa: E731
    keys, values = vectors(size // groups * key_dim), vectors(size * value_dim)
    out, new_k, u = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, blocks),
            in_specs=[keys, keys, values, vectors(size * key_dim) if per_channel else scalars, scalars, states],
            out_specs=[values, keys, values],
        ),
        out_shape=[jax.ShapeDtypeStruct(flat(x).shape, jnp.float32) for x in (v, k, v)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * v.size * (2 * key_dim + 3 * tokens),
            transcendentals=log_decay.size * tokens,
            bytes_accessed=batch * value_heads * key_dim * value_dim * state.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for x in (q, k, v, log_decay, beta))
            + (2 * v.size + k.size) * 4,
        ),
        interpret=interpret,
        name="gated_delta_verify",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(x.astype(jnp.int32) for x in (read_slots, lengths)),
        *map(flat, (q, k, v)),
        flat(log_decay) if per_channel else by_block(log_decay),
        by_block(beta),
        state,
    )
    (decays,) = masked(lengths, log_decay)
    return out.reshape(v.shape), new_k.reshape(k.shape), u.reshape(v.shape), decays


def _kernel(layer, read_slots, lengths, q, k, v, log_decay, beta, state, out, new_k, new_u):
    """Blocks: q, k, new_k [T, hk dk]; v, out, new_u [T, hv dv]; log_decay [T, hv dk] or [T, hv]; beta [T, hv];
    state [hv, dk, dv]."""
    heads, key_dim, value_dim = state.shape
    groups = heads * key_dim // k.shape[1]
    valid = jax.lax.broadcasted_iota(jnp.int32, (1, len(v), 1), 1) < lengths[pl.program_id(0)]

    def by_head(x, width):
        parts = jnp.stack([x[:, i : i + width] for i in range(0, x.shape[1], width)])
        return jnp.where(valid, parts.astype(jnp.float32), 0)

    queries, keys = (normalised(by_head(x, key_dim)) for x in (q, k))
    for head in range(len(keys)):
        new_k[:, head * key_dim : (head + 1) * key_dim] = keys[head]
    queries, keys = for_value_heads(queries * key_dim**-0.5, groups), for_value_heads(keys, groups)
    # Spread along lanes once, not wherever it is used.
    decays = jnp.broadcast_to(by_head(log_decay, log_decay.shape[1] // heads), keys.shape)
    states = state[...].astype(jnp.float32)
    outs, u = solve(queries, keys, by_head(v, value_dim), decays, by_head(beta, 1), states)
    for head in range(heads):
        lanes = slice(head * value_dim, (head + 1) * value_dim)
        out[:, lanes], new_u[:, lanes] = outs[head], u[head]


def solve(
    q: Float[Array, "h T dk"],
    k: Float[Array, "h T dk"],
    v: Float[Array, "h T dv"],
    log_decay: Float[Array, "h T dk"],
    beta: Float[Array, "h T 1"],
    S: Float[Array, "h dk dv"],
) -> tuple[Float[Array, "h T dv"], Float[Array, "h T dv"]]:
    """Outputs and u of tokens from states S; q and k normalised, and 0 throughout on padding."""
    tokens = v.shape[1]
    row = jax.lax.broadcasted_iota(jnp.int32, (1, tokens, 1), 1)
    # Token i's column of both products with all later tokens t; `sums` is the log of d(i, t).
    columns = []
    sums = jnp.zeros_like(log_decay)
    for i in reversed(range(tokens)):
        decayed = k[:, i : i + 1] * jnp.exp(sums)
        kk, qk = ((x * decayed).sum(axis=2, keepdims=True) for x in (k, q))
        columns.append((jnp.where(row > i, kk, 0) * beta, jnp.where(row >= i, qk, 0)))
        sums = jnp.where(row >= i, sums + log_decay[:, i : i + 1], 0)
    before = jnp.exp(sums)
    both = jnp.concatenate([k * before, q * before], axis=1)
    seen = jnp.stack([product(x, y) for x, y in zip(both, S, strict=True)])
    u, out = beta * (v - seen[:, :tokens]), seen[:, tokens:]
    for i, (kk, qk) in enumerate(reversed(columns)):
        u = u - kk * u[:, i : i + 1]
        out = out + qk * u[:, i : i + 1]
    return out, u
