"""The gated delta rule for any XLA backend: one step for decode, a scan over chunks of tokens for prefill.

Chunked form (the WY representation of Yang et al., arXiv:2406.06484, with decay). Inside a chunk that starts at state
S, write d(i, t) for the product of the decays of tokens i+1..t, and d(t) for that of the chunk's tokens up to t. Then

    u_t = beta_t (v_t - S^T (d(t) k_t) - sum_{i<t} (k_t . d(i, t) k_i) u_i)
    o_t = S^T (d(t) q_t) + sum_{i<=t} (q_t . d(i, t) k_i) u_i

so U solves a unit lower triangular system, and the next state is d(C) S + sum_i (d(i, C) k_i) u_i^T.

Every decay factor is built as a product of numbers at most 1, never as a quotient or as the exponential of a
difference of long sums: strong decay underflows to the zero that it is, and nothing overflows or cancels.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Tokens in a chunk.
CHUNK = 64

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def gated_delta(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "L N Hv dk dv"]]:
    """Arguments and result as in `pallas_kernels.gated_delta.gated_delta`."""
    tokens, groups = q.shape[1], v.shape[2] // k.shape[2]
    valid = jnp.arange(tokens)[None, :] < lengths[:, None]
    q, k, v, log_decay, beta = (
        jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, 0).astype(jnp.float32)
        for x in (q, k, v, log_decay, beta)
    )
    q = jnp.repeat(_l2(q) * q.shape[-1] ** -0.5, groups, axis=2)
    k = jnp.repeat(_l2(k), groups, axis=2)
    decay = jnp.exp(log_decay)
    S = state[layer, read_slots].astype(jnp.float32)
    if tokens == 1:
        out, S = _step(q[:, 0], k[:, 0], v[:, 0], decay[:, 0], beta[:, 0], S)
        out = out[:, None]
    else:
        out, S = _chunks(q, k, v, decay, beta, S)
    return out, state.at[layer, write_slots].set(S.astype(state.dtype))


def _l2(x: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
    return x * jax.lax.rsqrt(_einsum("...d,...d->...", x, x)[..., None] + 1e-6)


def _step(q, k, v, decay, beta, S):
    """One token of each row: [B, H, d] inputs, S [B, H, dk, dv]."""
    if decay.ndim == 2:
        decay = decay[..., None]
    rows = jnp.stack([k, q], axis=2) * decay[:, :, None]
    seen = _einsum("bhrk,bhkv->bhrv", rows, S)
    u = beta[..., None] * (v - seen[:, :, 0])
    out = seen[:, :, 1] + _einsum("bhk,bhk->bh", q, k)[..., None] * u
    return out, decay[..., None] * S + k[..., None] * u[..., None, :]


def _chunks(q, k, v, decay, beta, S):
    """Any number of tokens: [B, T, H, d] inputs, S [B, H, dk, dv]."""
    batch, tokens, heads = v.shape[:3]
    count = -(-tokens // CHUNK)

    def split(x, fill):
        x = jnp.pad(x, [(0, 0), (0, count * CHUNK - tokens), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
        return jnp.moveaxis(x.reshape(batch, count, CHUNK, *x.shape[2:]), (1, 3), (0, 2))

    chunks = split(q, 0), split(k, 0), split(v, 0), split(decay, 1), split(beta, 0)
    # Checkpointed: the backward pass keeps one state a chunk and computes the rest again.
    S, out = jax.lax.scan(jax.checkpoint(_chunk), S, chunks)
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(batch, count * CHUNK, heads, v.shape[-1])
    return out[:, :tokens], S


def _chunk(S, chunk):
    """One chunk of each row: [B, H, C, d] inputs, S [B, H, dk, dv]."""
    q, k, v, decay, beta = chunk
    if decay.ndim == 3:
        decay = jnp.broadcast_to(decay[..., None], k.shape)
    products, before, after = _decayed_products(jnp.stack([k, q], axis=2), k, decay)
    seen = _einsum("bhrck,bhkv->bhrcv", jnp.stack([k, q], axis=2) * before[:, :, None], S)
    system = jnp.eye(CHUNK) + beta[..., None] * jnp.tril(products[:, :, 0], -1)
    u = jax.lax.linalg.triangular_solve(
        system, beta[..., None] * (v - seen[:, :, 0]), left_side=True, lower=True, unit_diagonal=True
    )
    out = seen[:, :, 1] + _einsum("bhti,bhiv->bhtv", products[:, :, 1], u)
    return before[:, :, -1, :, None] * S + _einsum("bhck,bhcv->bhkv", k * after, u), out


def _decayed_products(rows, k, decay):
    """rows_t . d(i, t) k_i for i <= t, zero elsewhere, and each token's decay since the start and until the end.

    Doubles blocks of tokens from 1 to C. A pair of tokens is computed at the size at which its two tokens first fall
    into one block, as the product over the left half's rest and over the right half's beginning.
    """
    batch, heads, tokens, dim = k.shape
    products = _einsum("bhrck,bhck->bhrc", rows, k)[..., None, None]
    before, after = decay, jnp.ones_like(decay)
    size = 1
    while size < tokens:
        pairs = tokens // (2 * size)
        before_, after_ = (x.reshape(batch, heads, pairs, 2, size, dim) for x in (before, after))
        rows_ = rows.reshape(batch, heads, 2, pairs, 2, size, dim)[..., 1, :, :] * before_[:, :, None, :, 1]
        columns = k.reshape(batch, heads, pairs, 2, size, dim)[..., 0, :, :] * after_[:, :, :, 0]
        corner = _einsum("bhrntk,bhnik->bhrnti", rows_, columns)
        blocks = products.reshape(batch, heads, 2, pairs, 2, size, size)
        upper = jnp.concatenate([blocks[..., 0, :, :], jnp.zeros_like(corner)], axis=-1)
        lower = jnp.concatenate([corner, blocks[..., 1, :, :]], axis=-1)
        products = jnp.concatenate([upper, lower], axis=-2)
        left, right = before_[:, :, :, 0], before_[:, :, :, 1]
        before = jnp.stack([left, right * left[..., -1:, :]], axis=3)
        # `right`'s last row is the decay of its whole half.
        after = jnp.stack([after_[:, :, :, 0] * right[..., -1:, :], after_[:, :, :, 1]], axis=3)
        size *= 2
    return products.reshape(batch, heads, 2, tokens, tokens), before.reshape(k.shape), after.reshape(k.shape)
