"""What the kernels in Pallas' Triton dialect share: products of tiles, and the decays between the tokens of a chunk.

Decays are exponentials of a difference of running sums, which is exact as the sums are kept in two parts. One has few
enough bits for its sums to be exact, the other is so small that its rounding does not matter.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Log-decays below this leave nothing (exp(-100) is no normal float32), and limit the bits of a sum.
_LOWEST_LOG_DECAY = -100.0
_MAX_CHUNK = 64


def dot(a: Float[Array, "m k"], b: Float[Array, "k n"], exact: bool) -> Float[Array, "m n"]:
    """Of float32 factors if exact, else of factors rounded to bfloat16; summed in float32."""
    if exact:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)
    return jnp.dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def at_and_before(chunk: int) -> Bool[Array, "C C"]:
    """Whether token t of a chunk is token i or one after it, at [t, i]."""
    token = jnp.arange(chunk)
    return token[:, None] >= token[None, :]


def running_sums(log_decay: Float[Array, "C *d"]) -> tuple[list[Array], list[Array]]:
    """Sums over the tokens of a chunk up to each, and over all, each in two parts.

    Of at most 64 numbers of at least -100 (or taken as that): multiples of 2^-11 below 2^13, and numbers below 2^-5.
    """
    if log_decay.shape[0] > _MAX_CHUNK:
        raise ValueError(f"running_sums: expected at most {_MAX_CHUNK} tokens, got {log_decay.shape[0]}")
    x = jnp.maximum(log_decay, _LOWEST_LOG_DECAY)
    high = jnp.floor(x * 2048.0) * (1 / 2048.0)
    parts = (high, x - high)
    return [jnp.cumsum(part, axis=0) for part in parts], [part.sum(axis=0) for part in parts]


def decay_between(to: list[Array], since: list[Array], index_to: Any, index_since: Any) -> Array:
    """exp(to[index_to] - since[index_since]), each of two parts."""
    high, low = (t[index_to] - s[index_since] for t, s in zip(to, since, strict=True))
    return jnp.exp(high + low)
