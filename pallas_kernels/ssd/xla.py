"""Mamba-2's recurrence for any XLA backend: one step for decode, a scan over chunks of tokens for prefill.

Chunked form (arXiv:2405.21060, section 6). In a chunk that starts at state h, let d(i, t) be the product of the decays
of tokens i+1..t and d(t) that of the chunk's tokens up to t. Then

    y_t = d(t) h C_t + sum_{i<=t} d(i, t) (B_i . C_t) dt_i x_i + D x_t

and the next state is d(last) h + sum_i d(i, last) dt_i x_i B_i^T. B . C is computed once for the heads of a group.
Decays are never quotients (`pallas_kernels.decay`): strong ones underflow to zero, nothing overflows or cancels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import slots
from pallas_kernels.decay import segment_decays
from pallas_kernels.ssd.xla_fold import fold

# Tokens in a chunk. On an AVX-512 core, for 64 heads of 64 with 8 groups of 128: 16 takes 15 % less time, but doubles
# the steps of the scan; 64 takes 20 % more.
CHUNK = 32

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def ssd(
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
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
) -> tuple[Float[Array, "B T H P"], Float[Array, "L S H P N"]]:
    """Arguments and result as in `pallas_kernels.ssd.ssd`."""
    A, D = A.astype(jnp.float32), D.astype(jnp.float32)
    valid = jnp.arange(x.shape[1]) < lengths[:, None]
    h = slots.read(state, layer, read_slots).astype(jnp.float32)
    if checkpoint_lengths is not None and checkpoint_slots is not None:
        # A checkpoint that is none keeps what the null slot holds.
        kept = slots.read(state, layer, checkpoint_slots.reshape(-1)).astype(jnp.float32)
        kept = kept.reshape(*checkpoint_slots.shape, *kept.shape[1:])
        y, h, kept = chunks(h, A, D, x, dt, B, C, valid, checkpoints=(checkpoint_lengths, kept))
        state = slots.write(state, layer, write_slots, lambda row: h[row])
        kept = kept.reshape(-1, *h.shape[1:])
        return y, slots.write(state, layer, checkpoint_slots.reshape(-1), lambda row: kept[row])
    if x.shape[1] > 1:
        y, h, _ = chunks(h, A, D, x, dt, B, C, valid)
        return y, slots.write(state, layer, write_slots, lambda row: h[row])
    heads, groups = x.shape[2], B.shape[2]
    x, dt, B, C = _mask(valid[:, 0], x[:, 0], dt[:, 0], B[:, 0], C[:, 0])
    decay, update = jnp.exp(dt * A), dt[..., None] * x
    # The output from the state before the update: it is read twice and written once, in two passes.
    seen = _einsum("bgqn,bgn->bgq", h.reshape(x.shape[0], groups, -1, h.shape[-1]), C).reshape(x.shape)
    overlap = jnp.repeat(_einsum("bgn,bgn->bg", B, C), heads // groups, axis=1)
    y = decay[..., None] * seen + overlap[..., None] * update + D[:, None] * x
    B = jnp.repeat(B, heads // groups, axis=1)
    new_row = lambda row: decay[row, :, None, None] * h[row] + update[row, :, :, None] * B[row, :, None]  # noqa: E731
    return y[:, None], slots.write(state, layer, write_slots, new_row, least_rounds=1)


def _mask(valid: Bool[Array, "*rows"], *inputs: Float[Array, "..."]) -> list[Float[Array, "..."]]:
    """Float32 inputs, 0 on padding: the decay is then 1 and the update 0."""
    return [jnp.where(jnp.expand_dims(valid, range(valid.ndim, v.ndim)), v, 0).astype(jnp.float32) for v in inputs]


def chunks(
    h: Float[Array, "B H P N"],
    A: Float[Array, " H"],
    D: Float[Array, " H"],
    *inputs: Array,
    checkpoints: tuple[Int[Array, "B M"], Float[Array, "B M H P N"]] | None = None,
) -> tuple[Float[Array, "B T H P"], Float[Array, "B H P N"], Any]:
    """Outputs, states after all tokens, and `checkpoints[1]` with the states after `checkpoints[0]` tokens put in
    wherever that is more than 0. `inputs`: x, dt, B, C and which tokens are valid."""
    batch, tokens = inputs[0].shape[:2]
    size = min(CHUNK, tokens)
    count = -(-tokens // size)

    def split(v: Array) -> Array:
        v = jnp.pad(v, [(0, 0), (0, count * size - tokens), *[(0, 0)] * (v.ndim - 2)])
        return v.reshape(batch, count, size, *v.shape[2:]).swapaxes(0, 1)

    def step(carry, inputs):
        h, kept, start = carry
        if checkpoints is not None:
            kept = _keep(checkpoints[0] - start, A, h, kept, *inputs)
        h, y = _chunk(A, D, h, inputs)
        return (h, kept, start + size), y

    carry = h, None if checkpoints is None else checkpoints[1], 0
    (h, kept, _), y = jax.lax.scan(step, carry, tuple(map(split, inputs)))
    return y.swapaxes(0, 1).reshape(batch, count * size, *y.shape[3:])[:, :tokens], h, kept


def _keep(counts: Int[Array, "B M"], A, h, kept, x, dt, B, *_: Array) -> Float[Array, "B M H P N"]:
    """`kept` with the states after counts of a chunk's tokens, where that lies within it: folds of their records."""
    inside = (counts > 0) & (counts <= x.shape[1])

    def folded(kept):
        dt_x = dt[..., None].astype(jnp.float32) * x.astype(jnp.float32)
        states = jax.vmap(fold, in_axes=(None, None, None, None, 1), out_axes=1)(h, B, dt_x, dt * A, counts)
        return jnp.where(inside[..., None, None, None], states, kept)

    return jax.lax.cond(inside.any(), folded, lambda kept: kept, kept)


def _chunk(
    A: Float[Array, " H"], D: Float[Array, " H"], h: Float[Array, "B H P N"], inputs: tuple[Array, ...]
) -> tuple[Float[Array, "B H P N"], Float[Array, "B Q H P"]]:
    """One chunk of Q tokens of each row: [B, Q, ...] inputs. Returns the next state and the outputs."""
    x, dt, B, C = _mask(inputs[-1], *inputs[:-1])
    groups = B.shape[2]

    def by_group(v: Float[Array, "B H ..."]) -> Float[Array, "B G H/G ..."]:
        return v.reshape(v.shape[0], groups, -1, *v.shape[2:])

    decays, before = map(by_group, segment_decays((dt * A).swapaxes(1, 2)))
    update, grouped = by_group((dt[..., None] * x).swapaxes(1, 2)), by_group(h)
    scores = _einsum("btgn,bign->bgti", C, B)[:, :, None] * decays
    y = _einsum("bgrti,bgrip->bgrtp", scores, update)
    y = y + before[..., None] * _einsum("btgn,bgrpn->bgrtp", C, grouped)
    added = _einsum("bgrip,bign->bgrpn", decays[..., -1, :, None] * update, B)
    h = (before[..., -1, None, None] * grouped + added).reshape(h.shape)
    y = y.reshape(*h.shape[:2], *y.shape[3:]).swapaxes(1, 2)
    return h, y + D[:, None] * x
