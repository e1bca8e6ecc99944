"""The gated delta rule for any XLA backend: one step for decode, a scan over chunks of tokens for prefill.

Chunked form (the WY representation of arXiv:2406.06484 with the decay of arXiv:2412.06464). In a chunk that starts at
state S, let d(i, t) be the product of the decays of tokens i+1..t and d(t) that of the chunk's tokens up to t. Then

    u_t = beta_t (v_t - S^T (d(t) k_t) - sum_{i<t} (k_t . d(i, t) k_i) u_i)
    o_t = S^T (d(t) q_t) + sum_{i<=t} (q_t . d(i, t) k_i) u_i

so the u solve a unit lower triangular system, and the next state is d(C) S + sum_i (d(i, C) k_i) u_i^T.

No decay is ever a quotient, nor the exponential of a difference of running sums: each is a product of numbers at most
1, or the exponential of a sum over just its own tokens. Strong decay underflows to zero; nothing overflows or cancels.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import slots
from pallas_kernels.decay import segment_decays
from pallas_kernels.gated_delta.xla_fold import fold

# Tokens in a chunk. On an AVX-512 core, for 4 to 8 heads of 64 or 128: 64 takes 30 to 60 % more time than 32; 16 takes
# 5 to 15 % less, but doubles the steps of the scan and the states that the backward pass keeps.
CHUNK = 32

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
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "L N Hv dk dv"]]:
    """Arguments and result as in `pallas_kernels.gated_delta.gated_delta`."""
    valid = jnp.arange(q.shape[1]) < lengths[:, None]
    inputs = q, k, v, log_decay, beta, valid
    # Not slots.read: the products below need a copy of S in memory anyway, and it would copy a single row's twice.
    S = state[layer, read_slots].astype(jnp.float32)
    if checkpoint_lengths is not None and checkpoint_slots is not None:
        # A checkpoint that is none keeps what the null slot holds.
        kept = slots.read(state, layer, checkpoint_slots.reshape(-1)).astype(jnp.float32)
        kept = kept.reshape(*checkpoint_slots.shape, *kept.shape[1:])
        out, S, kept = _checkpointed_chunks(S, kept, checkpoint_lengths, *inputs)
        state = slots.write(state, layer, write_slots, lambda row: S[row])
        kept = kept.reshape(-1, *S.shape[1:])
        return out, slots.write(state, layer, checkpoint_slots.reshape(-1), lambda row: kept[row])
    if q.shape[1] > 1:
        out, S = _chunks(S, *inputs)
        return out, slots.write(state, layer, write_slots, lambda row: S[row])
    q, k, v, log_decay, beta = prepare(*(x[:, 0] for x in inputs))
    decay = jnp.exp(log_decay if log_decay.ndim == k.ndim else log_decay[..., None])
    # Both products in one pass over S, the output's from the state before the update: S is read twice, written once.
    seen = _einsum("bhrk,bhkv->bhrv", jnp.stack([k, q], axis=2) * decay[:, :, None], S)
    u = beta[..., None] * (v - seen[:, :, 0])
    out = seen[:, :, 1] + _einsum("bhk,bhk->bh", q, k)[..., None] * u
    new_row = lambda row: decay[row, :, :, None] * S[row] + k[row, :, :, None] * u[row, :, None]  # noqa: E731
    return out[:, None], slots.write(state, layer, write_slots, new_row, least_rounds=1)


def prepare(
    q: Float[Array, "*rows Hk dk"],
    k: Float[Array, "*rows Hk dk"],
    v: Float[Array, "*rows Hv dv"],
    log_decay: Float[Array, "*rows Hv"] | Float[Array, "*rows Hv dk"],
    beta: Float[Array, "*rows Hv"],
    valid: Bool[Array, "*rows"],
):
    """Float32 inputs with q and k normalised and repeated for the value heads; padding made decay 1 and update 0."""
    q, k, v, log_decay, beta = (
        jnp.where(jnp.expand_dims(valid, range(valid.ndim, x.ndim)), x, 0).astype(jnp.float32)
        for x in (q, k, v, log_decay, beta)
    )
    groups = v.shape[-2] // k.shape[-2]
    q, k = normalised(q) * q.shape[-1] ** -0.5, normalised(k)
    return jnp.repeat(q, groups, axis=-2), jnp.repeat(k, groups, axis=-2), v, log_decay, beta


def normalised(x: Float[Array, "*heads d"]) -> Float[Array, "*heads d"]:
    """x divided by sqrt(sum of squares + 1e-6)."""
    return x * jax.lax.rsqrt(_einsum("...d,...d->...", x, x)[..., None] + 1e-6)


def _chunks(
    S: Float[Array, "B Hv dk dv"], *inputs: Float[Array, "B T ..."]
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "B Hv dk dv"]]:
    def step(S, inputs):
        S, out, _ = chunk(S, inputs)
        return S, out

    # Checkpointed: the backward pass keeps one state a chunk and computes the rest again.
    S, out = over_chunks(jax.checkpoint(step), S, *inputs)
    return out, S


def _checkpointed_chunks(
    S: Float[Array, "B Hv dk dv"],
    kept: Float[Array, "B M Hv dk dv"],
    checkpoint_lengths: Int[Array, "B M"],
    *inputs: Float[Array, "B T ..."],
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "B Hv dk dv"], Float[Array, "B M Hv dk dv"]]:
    """As `_chunks`, with `kept` replaced by the state after so many tokens, wherever that is more than 0.

    Within a chunk, u does not depend on later tokens: the state there is the fold of the records until then.
    """
    states_at = jax.vmap(fold, in_axes=(None, None, None, None, 1), out_axes=1)

    def step(carry, inputs):
        S, kept, start = carry
        _, k, _, log_decay, _, _ = inputs
        next_S, out, u = chunk(S, inputs)
        counts = checkpoint_lengths - start
        inside = (counts > 0) & (counts <= k.shape[1])

        def keep(kept):
            states = states_at(S, normalised(k.astype(jnp.float32)), u, log_decay, counts)
            return jnp.where(inside[..., None, None, None], states, kept)

        kept = jax.lax.cond(inside.any(), keep, lambda kept: kept, kept)
        return (next_S, kept, start + k.shape[1]), out

    (S, kept, _), out = over_chunks(step, (S, kept, 0), *inputs)
    return out, S, kept


def over_chunks(step: Callable[..., tuple[Any, Any]], carry: Any, *inputs: Float[Array, "B T ..."]) -> tuple[Any, Any]:
    """Scans `step(carry, chunk's inputs) -> (carry, results)` over chunks; the results are [B, T, ...] arrays again.

    What fills up the last chunk is 0, invalid tokens among `inputs` too.
    """
    batch, tokens = inputs[0].shape[:2]
    size = chunk_size(tokens)
    count = -(-tokens // size)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, count * size - tokens), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(batch, count, size, *x.shape[2:]).swapaxes(0, 1)

    def joined(x):
        return x.swapaxes(0, 1).reshape(batch, count * size, *x.shape[3:])[:, :tokens]

    carry, results = jax.lax.scan(step, carry, tuple(map(split, inputs)))
    return carry, jax.tree.map(joined, results)


def chunk_size(tokens: int) -> int:
    """Of a call with so many tokens: a power of two."""
    return min(CHUNK, 1 << (tokens - 1).bit_length())


def chunk(
    S: Float[Array, "B Hv dk dv"], inputs: tuple[Array, ...]
) -> tuple[Float[Array, "B Hv dk dv"], Float[Array, "B C Hv dv"], Float[Array, "B C Hv dv"]]:
    """One chunk of C tokens of each row: `prepare`'s inputs, [B, C, ...]. Returns the next state, the outputs and u."""
    q, k, v, log_decay, beta = (x.swapaxes(1, 2) for x in prepare(*inputs))
    decayed_products = _products_per_channel if log_decay.ndim == k.ndim else _products_per_head
    kk, qk, before, after = decayed_products(q, k, log_decay)
    seen_by_k, seen_by_q = _both(k * before, q * before, "bhck,bhkv->bhcv", S)
    u = _einsum("bhti,bhiv->bhtv", _unit_lower_inverse(beta[..., None] * kk), beta[..., None] * (v - seen_by_k))
    out = seen_by_q + _einsum("bhti,bhiv->bhtv", qk, u)
    S = jnp.swapaxes(before[:, :, -1:], 2, 3) * S + _einsum("bhck,bhcv->bhkv", k * after, u)
    return S, out.swapaxes(1, 2), u.swapaxes(1, 2)


def _both(a, b, equation, x):
    """The products of two [..., C, dk] arrays with x, as one.

    A leading axis of 2 would do too, but the factors it is multiplied by then have gradients that are sums over it,
    and those take XLA on CPU longer than all the products together.
    """
    return jnp.split(_einsum(equation, jnp.concatenate([a, b], axis=-2), x), 2, axis=-2)


def _products_per_head(q: Float[Array, "B H C dk"], k: Float[Array, "B H C dk"], log_decay: Float[Array, "B H C"]):
    """See `_products_per_channel`; the decays are [B, H, C, 1]."""
    decays, before = segment_decays(log_decay)
    kk, qk = _both(k, q, "bhtk,bhik->bhti", k)
    return kk * decays, qk * decays, before[..., None], decays[:, :, -1, :, None]


def _products_per_channel(
    q: Float[Array, "B H C dk"], k: Float[Array, "B H C dk"], log_decay: Float[Array, "B H C dk"]
):
    """k_t . d(i, t) k_i, then q_t . d(i, t) k_i, for i <= t, else 0 [B, H, C, C]; then d(t) and d(i, C) [B, H, C, dk].

    Doubles blocks of tokens from 1 to C. A pair of tokens meets where its two tokens first fall into one block: d(i, t)
    is then the decay from i to the end of the left half times that from there to t. (k's own diagonal is left 0.)
    """
    *heads, size, _ = k.shape
    qk = _einsum("bhck,bhck->bhc", q, k)[..., None, None]
    kk = jnp.zeros_like(qk)
    before = jnp.exp(log_decay)
    after = jnp.ones_like(before)
    half = 1
    while half < size:

        def halves(x, rows=half):
            x = x.reshape(*heads, -1, 2, rows, x.shape[-1])
            return x[:, :, :, 0], x[:, :, :, 1]

        (k_left, k_right), (_, q_right), (before_left, before_right), (after_left, after_right) = map(
            halves, (k, q, before, after)
        )
        corners = _both(k_right * before_right, q_right * before_right, "bhntk,bhnik->bhnti", k_left * after_left)
        kk, qk = (_lower_blocks(halves(x), corner) for x, corner in zip((kk, qk), corners, strict=True))
        # The last row of `before` is the decay of its whole half.
        before = jnp.stack([before_left, before_right * before_left[..., -1:, :]], axis=3)
        after = jnp.stack([after_left * before_right[..., -1:, :], after_right], axis=3)
        half *= 2
    return kk[:, :, 0], qk[:, :, 0], before.reshape(k.shape), after.reshape(k.shape)


def _lower_blocks(diagonal: tuple[Float[Array, "*n C C"], Float[Array, "*n C C"]], corner: Float[Array, "*n C C"]):
    """[[diagonal[0], 0], [corner, diagonal[1]]]."""
    upper = jnp.concatenate([diagonal[0], jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, diagonal[1]], axis=-1)], axis=-2)


def _unit_lower_inverse(x: Float[Array, "*heads C C"]) -> Float[Array, "*heads C C"]:
    """The inverse of the identity plus x's part below the diagonal, by block elimination.

    Doubles blocks from 1 to C: [[A, 0], [X, D]]^-1 = [[A^-1, 0], [-D^-1 X A^-1, D^-1]]. Unlike a power series in x this
    stays accurate for repeated keys; unlike LAPACK's solver it is differentiated by products and starts no threads.
    """
    token = np.arange(x.shape[-1])
    inverse = jnp.broadcast_to(jnp.eye(len(token)), x.shape)
    half = 1
    while half < len(token):
        block = token // half
        corner = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
        part = jnp.where(corner, x, 0)
        inverse = inverse - (
            part if half == 1 else _einsum("...ij,...jk->...ik", _einsum("...ij,...jk->...ik", inverse, part), inverse)
        )
        half *= 2
    return inverse
