"""Inputs of `conv_ssd`, as its tests share them."""

import jax
import jax.numpy as jnp
import numpy as np

BATCH, LAYERS, SLOTS = 3, 2, 9


def make_arguments(
    tokens, heads=8, groups=2, head_dim=64, width=128, taps=4, bias=True, dtype=jnp.float32, rate=1.0, batch=BATCH
):
    """`inputs` to `state` of `conv_ssd`."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    widths = (heads * head_dim, 2 * groups * width)
    return (
        tuple(normal(batch, tokens, channels) for channels in widths),
        tuple(normal(channels, taps, scale=0.5) for channels in widths),
        tuple(normal(channels) for channels in widths) if bias else None,
        tuple(normal(LAYERS, SLOTS, taps - 1, channels) for channels in widths),
        jax.nn.softplus(2 * normal(batch, tokens, heads, dtype=jnp.float32)),
        -rate * jnp.exp(normal(heads, dtype=jnp.float32)),
        normal(heads, dtype=jnp.float32),
        normal(LAYERS, SLOTS, heads, head_dim, width, dtype=jnp.float32),
    )
