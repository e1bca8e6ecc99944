"""Inputs of a layer's convolution and delta rule: of Gated DeltaNet (a decay a head) or KDA (one a channel)."""

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ["per_head", "per_channel"]
BATCH, LAYERS, SLOTS = 3, 2, 12


def make_arguments(kind, tokens, dtype=jnp.float32, dim=128, taps=4, key_heads=1, groups=2, decay_scale=0.05, seed=0):
    """`inputs` to `state` of `conv_gated_delta`. KDA has `key_heads * groups` heads."""
    rng = np.random.default_rng(seed)
    value_heads = key_heads * groups

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    if kind == "per_head":
        channels, decays = [(2 * key_heads + value_heads) * dim], [value_heads]
    else:
        channels, decays = [3, value_heads * dim], [value_heads, dim]
    states = 3 if len(channels) == 2 else 1
    return (
        normal(BATCH, tokens, *channels, dtype=dtype),
        0.5 * normal(*channels, taps, dtype=dtype),
        tuple(normal(LAYERS, SLOTS, taps - 1, channels[-1], dtype=dtype) for _ in range(states)),
        -decay_scale * jnp.exp(2 * normal(BATCH, tokens, *decays)),
        jax.nn.sigmoid(normal(BATCH, tokens, value_heads)),
        normal(LAYERS, SLOTS, value_heads, dim, dim),
    )
