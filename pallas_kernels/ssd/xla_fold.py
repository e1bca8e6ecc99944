"""Update records of Mamba-2 folded into states, for any XLA backend: d(n) h + sum_i d(i, n) (dt x)_i B_i^T.

A decay between tokens is the exponential of a sum over just the tokens between, so nothing overflows or cancels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.padding import masked


def fold(
    h: Float[Array, "B H P N"],
    B: Float[Array, "B T G N"],
    dt_x: Float[Array, "B T H P"],
    log_decay: Float[Array, "B T H"],
    counts: Int[Array, " B"],
) -> Float[Array, "B H P N"]:
    """The states after the first counts[b] records of each row."""
    B, dt_x, log_decay = masked(counts, B, dt_x, log_decay)
    later = jax.lax.cumsum(jnp.pad(log_decay[:, 1:], [(0, 0), (0, 1), (0, 0)]), axis=1, reverse=True)
    by_group = (dt_x * jnp.exp(later)[..., None]).reshape(*dt_x.shape[:2], B.shape[2], -1, dt_x.shape[3])
    added = jnp.einsum("btgrp,btgn->bgrpn", by_group, B, precision=jax.lax.Precision.HIGHEST)
    return jnp.exp(later[:, 0] + log_decay[:, 0])[..., None, None] * h + added.reshape(h.shape)
