"""Products of a chunk's decays, without a quotient and without a difference of running sums."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def segment_decays(log_decay: Float[Array, "*batch C"]) -> tuple[Float[Array, "*batch C C"], Float[Array, "*batch C"]]:
    """For the log decays (at most 0) of C tokens: how much is left of what each token added, and of what came before.

    Returns:
        decays: decays[t, i] is the product of the decays of tokens i+1..t for i <= t, else 0.
        before: before[t] is the product of the decays of tokens 0..t.
    """
    size = log_decay.shape[-1]
    lower = np.tri(size, dtype=bool)
    # sums[t, i]: the sum over tokens i+1..t, as a product with a constant 0/1 matrix. A difference of two running sums
    # would lose weak decays behind strong ones.
    sums = jnp.einsum(
        "...tj,ji->...ti",
        jnp.where(lower, log_decay[..., None, :], 0),
        np.tri(size, k=-1, dtype=np.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    before = jnp.exp(sums[..., 0] + log_decay[..., :1])
    return jnp.where(lower, jnp.exp(sums), 0), before
