"""Update records folded into states, for any XLA backend.

n records at once are d(n) S + sum_i (d(i, n) k_i) u_i^T: a decay between tokens is the exponential of a sum over just
the tokens between, so nothing overflows or cancels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.padding import masked


def fold(
    S: Float[Array, "B Hv dk dv"],
    k: Float[Array, "B T Hk dk"],
    u: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    counts: Int[Array, " B"],
) -> Float[Array, "B Hv dk dv"]:
    """The states after the first counts[b] records of each row."""
    k, u, log_decay = masked(counts, k, u, log_decay)
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    later = jax.lax.cumsum(jnp.pad(log_decay[:, 1:], [(0, 0), (0, 1), (0, 0), (0, 0)]), axis=1, reverse=True)
    k = jnp.repeat(k, u.shape[2] // k.shape[2], axis=2) * jnp.exp(later)
    added = jnp.einsum("bthk,bthv->bhkv", k, u, precision=jax.lax.Precision.HIGHEST)
    return jnp.exp(later[:, 0] + log_decay[:, 0])[..., None] * S + added
