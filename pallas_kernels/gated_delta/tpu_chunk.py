"""The maths of one chunk of tokens of the gated delta rule, on values in a TPU's registers and VMEM.

As in `xla.py`, for a chunk of C tokens that starts at state S: with kk[t, i] = k_t . d(i, t) k_i and qk likewise,

    u = (1 + beta kk)^-1 beta (v - before k S);  out = before q S + qk u;  S <- d S + (after k)^T u

Every step is taken for all heads before the next one: a product's result comes long after it was asked for, and the
other heads fill the time.

A sublane tile has 8 rows. Steps over blocks of fewer rows shift rows within a tile and mask; steps over whole tiles
take only the rows that matter.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

CHUNK = 64
# Halves of the blocks that are doubled: within a sublane tile, and of whole tiles.
_TILE = 8
_SMALL, _LARGE = (1, 2, 4), (8, 16, 32)


def chunk(
    q: Float[Array, "Hk C dk"],
    k: Float[Array, "Hk C dk"],
    v: Float[Array, "Hv C dv"],
    log_decay: Float[Array, "Hv C"] | Float[Array, "Hv C dk"],
    beta: Float[Array, "Hv C"],
    S: Float[Array, "Hv dv dk"],
    valid: Int[Array, ""],
    exact: bool,
) -> tuple[Float[Array, "Hv C dv"], Float[Array, "Hv dv dk"]]:
    """Outputs and next states, transposed, of the first `valid` tokens. Products of float32 factors if exact, else
    of factors rounded to bfloat16."""
    dot = _Dot(exact)
    row_valid, lane_valid = (jax.lax.broadcasted_iota(jnp.int32, s, 1) < valid for s in ((1, CHUNK, 1), (1, CHUNK)))
    q, k, v = (jnp.where(row_valid, x.astype(jnp.float32), 0) for x in (q, k, v))
    q, k = (x * jax.lax.rsqrt((x * x).sum(axis=2, keepdims=True) + 1e-6) for x in (q, k))
    q = q * q.shape[2] ** -0.5
    beta = jnp.where(lane_valid, beta, 0)
    if log_decay.ndim == 3:
        q, k = _for_value_heads(q, v), _for_value_heads(k, v)
        log_decay = jnp.where(row_valid, log_decay.astype(jnp.float32), 0)
        kk, qk, before, after = _products_per_channel(q, k, log_decay, dot)
    else:
        both = _for_value_heads(dot(jnp.concatenate([k, q], axis=1), k, (2, 2)), v)
        q, k = _for_value_heads(q, v), _for_value_heads(k, v)
        decays, before, after = _decays_per_head(jnp.where(lane_valid, log_decay, 0))
        kk, qk = both[:, :CHUNK] * decays, both[:, CHUNK:] * decays
    seen = dot(jnp.concatenate([k * before, q * before], axis=1), S, (2, 2))
    inverse = _unit_lower_inverse(_columns(beta) * kk, dot)
    u = dot(inverse * beta[:, None], v - seen[:, :CHUNK])
    out = seen[:, CHUNK:] + dot(qk, u)
    return out, before[:, CHUNK - 1 :] * S + dot(u, k * after, (1, 1))


class _Dot:
    """Products a head, over the given axes, summed in float32."""

    def __init__(self, exact: bool) -> None:
        self._options = {"precision": "highest"} if exact else {}
        self._dtype = jnp.float32 if exact else jnp.bfloat16

    def __call__(self, a: Float[Array, "h _ _"], b: Float[Array, "h _ _"], contract: tuple[int, int] = (2, 1)):
        a, b = a.astype(self._dtype), b.astype(self._dtype)
        numbers = (((contract[0] - 1,), (contract[1] - 1,)), ((), ()))
        options = {"preferred_element_type": jnp.float32, **self._options}
        return jnp.stack([jax.lax.dot_general(x, y, numbers, **options) for x, y in zip(a, b, strict=True)])


def _for_value_heads(x: Float[Array, "Hk *_"], v: Float[Array, "Hv *_"]) -> Float[Array, "Hv *_"]:
    groups = v.shape[0] // x.shape[0]
    return x if groups == 1 else jnp.stack([x[head // groups] for head in range(v.shape[0])])


def _columns(x: Float[Array, "h C"]) -> Float[Array, "h C 1"]:
    columns = x.T
    return jnp.stack([columns[:, head : head + 1] for head in range(x.shape[0])])


def _tokens():
    """Row and column numbers of a [1, C, C] array."""
    return (jax.lax.broadcasted_iota(jnp.int32, (1, CHUNK, CHUNK), axis) for axis in (1, 2))


def _decays_per_head(log_decay: Float[Array, "h C"]):
    """d(i, t) for i <= t, else 0 [h, C, C]; the decay of the tokens up to t, and that of those after it [h, C, 1]."""
    token, other = _tokens()
    lower = token >= other
    # [t, i]: the sum over tokens i+1..t, as a product with a 0/1 matrix. It is exact: x is a sum of three bfloat16's.
    x = jnp.where(lower, log_decay[:, None], 0).reshape(-1, CHUNK)
    mask = jnp.where(token > other, 1.0, 0.0).astype(jnp.bfloat16)[0]
    sums = jnp.zeros_like(x)
    for _ in range(3):
        part = x.astype(jnp.bfloat16)
        sums = sums + jnp.dot(part, mask, preferred_element_type=jnp.float32)
        x = x - part.astype(jnp.float32)
    sums = sums.reshape(-1, CHUNK, CHUNK)
    decays = jnp.where(lower, jnp.exp(sums), 0)
    before = jnp.exp(sums[:, :, :1] + log_decay[:, None, :1])
    return decays, before, _columns(decays[:, CHUNK - 1])


def _products_per_channel(
    q: Float[Array, "h C dk"], k: Float[Array, "h C dk"], log_decay: Float[Array, "h C dk"], dot: _Dot
):
    """k_t . d(i, t) k_i for i < t, and q_t . d(i, t) k_i for i <= t, else 0 [h, C, C]; before and after [h, C, dk].

    Doubles blocks of tokens from 1 to C; a pair of tokens meets where its two tokens first fall into one block.
    """
    token, other = _tokens()
    row = jax.lax.broadcasted_iota(jnp.int32, (1, CHUNK, 1), 1)
    kk = jnp.zeros((len(k), CHUNK, CHUNK), jnp.float32)
    qk = jnp.where(token == other, (q * k).sum(axis=2, keepdims=True), 0)
    before = total = jnp.exp(log_decay)
    after = jnp.ones_like(before)
    for half in _SMALL:
        right, corner = (row & half) != 0, _corner(token, other, half)
        near = jnp.where(right, before, after)
        both = dot(jnp.concatenate([k * near, q * near], axis=1), k * near, (2, 2))
        kk, qk = jnp.where(corner, both[:, :CHUNK], kk), jnp.where(corner, both[:, CHUNK:], qk)
        sibling = jnp.where(right, _rolled(total, half), _rolled(total, _TILE - half))
        before, after = jnp.where(right, before * sibling, before), jnp.where(right, after, after * sibling)
        total = total * sibling
    for half in _LARGE:
        rights = [_right(x, half) * _right(before, half) for x in (k, q)]
        both = dot(jnp.concatenate(rights, axis=1), k * after, (2, 2))
        corner = _right(_corner(token, other, half), half)
        kk, qk = (
            _joined(_left(x, half), jnp.where(corner, rows, _right(x, half)), half)
            for x, rows in zip((kk, qk), jnp.split(both, 2, axis=1), strict=True)
        )
        last_left, last_right = (_last_row(side(before, half), half) for side in (_left, _right))
        before = _joined(_left(before, half), _right(before, half) * last_left, half)
        after = _joined(_left(after, half) * last_right, _right(after, half), half)
    return kk, qk, before, after


def _rolled(x: Float[Array, "h C d"], rows: int) -> Float[Array, "h C d"]:
    """Each tile's rows moved on by so many, around the tile."""
    return pltpu.roll(x.reshape(-1, _TILE, x.shape[2]), rows, 1).reshape(x.shape)


def _corner(token: Int[Array, "1 C C"], other: Int[Array, "1 C C"], half: int):
    """Whether `token` is in the right and `other` in the left half of the same block of 2 half tokens."""
    apart = token ^ other
    return (apart >= half) & (apart < 2 * half) & (token > other)


# Halves of whole tiles: rows of all left or all right halves of blocks of 2 half rows.


def _left(x: Array, half: int) -> Array:
    return jnp.concatenate([x[:, start : start + half] for start in range(0, CHUNK, 2 * half)], axis=1)


def _right(x: Array, half: int) -> Array:
    return jnp.concatenate([x[:, start : start + half] for start in range(half, CHUNK, 2 * half)], axis=1)


def _joined(left: Array, right: Array, half: int) -> Array:
    starts = range(0, CHUNK // 2, half)
    return jnp.concatenate([x[:, start : start + half] for start in starts for x in (left, right)], axis=1)


def _last_row(x: Float[Array, "h C/2 d"], half: int) -> Float[Array, "h C/2 d"]:
    """Each half's last row, in all its rows."""
    lasts = [x[:, stop - 1 : stop] for stop in range(half, CHUNK // 2 + 1, half)]
    return jnp.concatenate([jnp.broadcast_to(x, (len(x), half, x.shape[2])) for x in lasts], axis=1)


def _unit_lower_inverse(x: Float[Array, "h C C"], dot: _Dot) -> Float[Array, "h C C"]:
    """The inverse of the identity plus x's part below the diagonal, by block elimination as in `xla.py`."""
    token, other = _tokens()
    identity = jnp.where(token == other, 1.0, 0.0)
    inverse = identity - jnp.where(_corner(token, other, 1), x, 0)
    for half in _SMALL[1:]:
        corner = jnp.where(_corner(token, other, half), x, 0)
        inverse = inverse - dot(dot(inverse, corner), inverse)
    for half in _LARGE:
        corner = jnp.where(_right(_corner(token, other, half), half), _right(x, half), 0)
        product = dot(corner, inverse)
        rows = dot(_right(inverse, half), _joined(jnp.zeros_like(product), product, half))
        inverse = _joined(_left(inverse, half), _right(inverse, half) - rows, half)
    return inverse
