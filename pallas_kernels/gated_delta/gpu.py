"""The gated delta rule on CUDA GPUs, in Pallas' Triton dialect: a program has one row, one value head and some of its
value channels, whose part of the state stays in registers. States come from the row's read slot and go to its write
slot of the same array.

Prefill takes 16 tokens at a time, the least that the matrix units take. The maths is that of `xla.py`, save the decays
between two tokens (`pallas_kernels.triton_maths`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pallas_kernels.triton_checkpoints import run, segments
from pallas_kernels.triton_maths import at_and_before, decay_between, dot, running_sums
from pallas_kernels.triton_records import load_masked

CHUNK = 16
# Value channels of a program: at batch 1, 32 heads of 128 channels then occupy all of a Hopper part.
VALUE_BLOCK = 32
# Key channels at a time where decays between all pairs of tokens are needed for each channel.
_KEY_BLOCK = 32


def accepts(q: Array, k: Array, v: Array, *_: Any, **__: Any) -> str | None:
    """Why the kernels cannot run these arguments of `gated_delta`, or None."""
    for name, width in (("key_head_dim", q.shape[3]), ("value_head_dim", v.shape[3])):
        if width not in (32, 64, 128, 256):
            return f"{name} {width} is not 32, 64, 128 or 256"
    return None


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
    interpret: Any = False,
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "L N Hv dk dv"]]:
    """Arguments and result as in `pallas_kernels.gated_delta.gated_delta`; `interpret` as of `pallas_call`."""
    batch, tokens, value_heads, value_dim = v.shape
    key_dim = q.shape[3]
    one = tokens == 1 and checkpoint_lengths is None
    kernel, padding = (_decode, 0) if one else (_prefill, -tokens % CHUNK)
    rows = (write_slots, lengths) if one else segments(lengths, write_slots, checkpoint_lengths, checkpoint_slots)
    arrays = [jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, log_decay, beta)]
    states = batch * value_heads * key_dim * value_dim
    out, state = pl.pallas_call(
        kernel,
        grid=(value_dim // VALUE_BLOCK, value_heads, batch),
        out_shape=[
            jax.ShapeDtypeStruct((batch, tokens + padding, value_heads, value_dim), jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={9: 1},
        compiler_params=_compiler_params(one, per_channel=log_decay.ndim == 4),
        cost_estimate=pl.CostEstimate(
            flops=7 * states * tokens,
            transcendentals=log_decay.size,
            bytes_accessed=2 * states * state.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for x in arrays)
            + v.size * 4,
        ),
        interpret=interpret,
        name=f"gated_delta_{'decode' if one else 'prefill'}",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(x.astype(jnp.int32) for x in (read_slots, *rows)),
        *arrays,
        state,
    )
    return out[:, :tokens], state


def _compiler_params(one: bool, per_channel: bool) -> triton.CompilerParams:
    """As many warps, and loads ahead of their chunk, as the registers allow."""
    if one:
        return triton.CompilerParams(num_warps=4, num_stages=1)
    return triton.CompilerParams(num_warps=8, num_stages=2 if per_channel else 1)


class Place(NamedTuple):
    """What a program has: a row, and indices of its part of a token's key, value and decay, and of a state."""

    row: Any
    key: tuple[Any, ...]
    value: tuple[Any, ...]
    decay: tuple[Any, ...]
    head: tuple[Any, ...]
    state: tuple[Any, ...]
    # Whether this is the one program of a value head, and of a key head.
    first_of_head: Any
    first_of_key: Any


def place(k: Any, v: Any, per_channel: bool) -> Place:
    """Of this program, given arrays [..., Hk, dk] and [..., Hv, dv]."""
    part, head, row = (pl.program_id(axis) for axis in range(3))
    values, groups = pl.ds(part * VALUE_BLOCK, VALUE_BLOCK), v.shape[-2] // k.shape[-2]
    return Place(
        row, (head // groups, slice(None)), (head, values), (head, slice(None)) if per_channel else (head,), (head,),
        (head, slice(None), values), part == 0, (part == 0) & (head % groups == 0),
    )  # fmt: skip


def _inverse_norm(x: Float[Array, "*t d"]) -> Float[Array, "*t"]:
    return jax.lax.rsqrt((x * x).sum(axis=-1) + 1e-6)


def token_of(here: Place, token: Any, valid: Any, *arrays: Any) -> list[Array]:
    """This program's q, k, v, log_decay and beta of a token, float32. On padding, whatever is there, they are 0: such a
    token neither decays nor updates."""
    places = (here.key, here.key, here.value, here.decay, here.head)
    return [load_masked(x, (here.row, token, *at), valid) for x, at in zip(arrays, places, strict=True)]


def step(S: Float[Array, "dk dv"], query: Array, key: Array, value: Array, log_decay: Array, strength: Array) -> Any:
    """One token: the next state, its output, and its record but for the decay: the key, normalised, and u."""
    query, key = (x * _inverse_norm(x) for x in (query, key))
    S = decayed(S, log_decay)
    u = strength * (value - (key[:, None] * S).sum(axis=0))
    S = S + key[:, None] * u
    return S, (query[:, None] * S).sum(axis=0) * key.shape[0] ** -0.5, key, u


def decayed(S: Float[Array, "dk dv"], log_decay: Float[Array, ""] | Float[Array, " dk"]) -> Float[Array, "dk dv"]:
    """By one decay, or by one for each key channel."""
    decay = jnp.exp(log_decay)
    return S * (decay[:, None] if decay.ndim else decay)


def _decode(layer, read_slots, write_slots, lengths, q, k, v, log_decay, beta, state, out, new_state):
    """The arrays are whole, as `gated_delta` takes them."""
    here = place(k, v, log_decay.ndim == 4)
    S = state[layer[0], read_slots[here.row], *here.state].astype(jnp.float32)
    token = token_of(here, jnp.int32(0), lengths[here.row] > 0, q, k, v, log_decay, beta)
    S, y, *_ = step(S, *token)
    out[here.row, 0, *here.value] = y
    new_state[layer[0], write_slots[here.row], *here.state] = S.astype(new_state.dtype)


def _prefill(layer, read_slots, bounds, slots, q, k, v, log_decay, beta, state, out, new_state):
    """The arrays are whole, as `gated_delta` takes them, with tokens a multiple of CHUNK, and `segments`."""
    here = place(k, v, log_decay.ndim == 4)
    row, key_head, (head, values) = here.row, here.key[0], here.value
    exact, key_dim = q.dtype == jnp.float32, k.shape[3]
    products_of = _products_per_channel if log_decay.ndim == 4 else _products_per_head

    def chunk(number, valid, S):
        tokens = pl.ds(number * CHUNK, CHUNK)

        def load(array, *index):
            x = array[row, tokens, *index].astype(jnp.float32)
            return jnp.where(valid if x.ndim == 1 else valid[:, None], x, 0)

        query, key, value = load(q, key_head, slice(None)), load(k, key_head, slice(None)), load(v, head, values)
        query_scale, key_scale = _inverse_norm(query) * key_dim**-0.5, _inverse_norm(key)
        strength = load(beta, head)
        kk, qk, before, after, total = products_of(
            lambda array, channels: load(array, key_head, channels), lambda *channels: load(log_decay, head, *channels),
            q, k, exact,
        )  # fmt: skip
        kk, qk = (x * scale[:, None] * key_scale for x, scale in ((kk, key_scale), (qk, query_scale)))
        query, key = query * query_scale[:, None], key * key_scale[:, None]
        seen = dot(key * before, S, exact)
        inverse = _unit_lower_inverse(strength[:, None] * kk)
        u = dot(inverse * strength, value - seen, exact)
        y = dot(query * before, S, exact) + dot(qk, u, exact)
        # A chunk that a boundary divides is taken twice.
        mask = valid[:, None] if slots.shape[1] > 1 else None
        triton.store(out.at[row, tokens, head, values], y, mask=mask)
        return total * S + dot((key * after).T, u, exact)

    first = state[layer[0], read_slots[row], *here.state]

    def store(slot, S):
        new_state[layer[0], slot, *here.state] = S.astype(new_state.dtype)

    run(bounds, slots, row, CHUNK, chunk, first.astype(jnp.float32), store)


def _products_per_head(load, load_decay, q, k, exact):
    sums, total = running_sums(load_decay())
    query, key = load(q, slice(None)), load(k, slice(None))
    decays = jnp.where(at_and_before(CHUNK), decay_between(sums, sums, (slice(None), None), (None, slice(None))), 0)
    kk, qk = (decays * dot(x, key.T, exact) for x in (key, query))
    before, after = jnp.exp(sums[0] + sums[1]), decay_between(total, sums, (None,), (slice(None),))
    return kk, qk, before[:, None], after[:, None], jnp.exp(total[0] + total[1])


def _products_per_channel(load, load_decay, q, k, exact):
    def add_channels(block, products):
        channels = pl.ds(block * _KEY_BLOCK, _KEY_BLOCK)
        sums, _ = running_sums(load_decay(channels))
        query, key = load(q, channels), load(k, channels)
        decays = decay_between(sums, sums, (slice(None), None), (None, slice(None)))
        decays = jnp.where(at_and_before(CHUNK)[:, :, None], decays, 0) * key[None]
        return [product + (x[:, None] * decays).sum(axis=2) for product, x in zip(products, (key, query), strict=True)]

    # A loop in the program too: all blocks at once would not fit the registers.
    nothing = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    kk, qk = jax.lax.fori_loop(0, k.shape[3] // _KEY_BLOCK, add_channels, [nothing, nothing])
    sums, total = running_sums(load_decay(slice(None)))
    before, after = jnp.exp(sums[0] + sums[1]), decay_between(total, sums, (None,), (slice(None),))
    return kk, qk, before, after, jnp.exp(total[0] + total[1])[:, None]


def _unit_lower_inverse(x: Float[Array, "C C"]) -> Float[Array, "C C"]:
    """The inverse of the identity plus x's part below the diagonal, by block elimination as in `xla.py`."""
    token = jnp.arange(CHUNK)
    apart, below = token[:, None] ^ token[None, :], token[:, None] > token[None, :]
    inverse = jnp.where(apart == 0, 1.0, 0.0)
    # As exact as float32, and on the matrix units: products of float32 elsewhere take more registers than there are.
    product = functools.partial(jnp.dot, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6)
    for half in (1, 2, 4, 8):
        corner = jnp.where((apart >= half) & (apart < 2 * half) & below, x, 0)
        inverse = inverse - (corner if half == 1 else product(product(inverse, corner), inverse))
    return inverse
