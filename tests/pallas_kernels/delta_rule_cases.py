"""Inputs for the interpreted kernels of the gated delta rule, wide enough for their tiles, and the check against the
reference."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta import reference

KINDS = ["per_head", "per_channel"]
BATCH, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, LAYERS, SLOTS = 3, 1, 2, 128, 256, 2, 7
TOKENS = 130

expected = jax.jit(reference.gated_delta)


def make_inputs(kind, tokens, seed=0, decay_scale=1.0, key_heads=KEY_HEADS, batch=BATCH, value_heads=VALUE_HEADS):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    heads = (value_heads,) if kind == "per_head" else (value_heads, KEY_DIM)
    return {
        "q": normal(batch, tokens, key_heads, KEY_DIM),
        "k": normal(batch, tokens, key_heads, KEY_DIM),
        "v": normal(batch, tokens, value_heads, VALUE_DIM),
        "log_decay": -decay_scale * jnp.exp(2 * normal(batch, tokens, *heads)),
        "beta": jax.nn.sigmoid(normal(batch, tokens, value_heads)),
    }


def make_state(seed=1, value_heads=VALUE_HEADS):
    shape = (LAYERS, SLOTS, value_heads, KEY_DIM, VALUE_DIM)
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def check(run, inputs, read_slots, write_slots, lengths, state=None, layer=1, atol=3e-6):
    """Agrees on valid outputs and on the slots written, and leaves the others alone. Returns output and state."""
    state = make_state() if state is None else state
    arguments = (*inputs.values(), state, layer, *map(jnp.array, (read_slots, write_slots, lengths)))
    out, new_state = run(*arguments)
    right, right_state = expected(*arguments)
    valid = np.arange(out.shape[1]) < np.array(lengths)[:, None]
    np.testing.assert_allclose(np.array(out)[valid], np.array(right)[valid], atol=atol, rtol=1e-5)
    np.testing.assert_allclose(new_state, right_state, atol=atol, rtol=1e-5)
    untouched = np.ones(SLOTS, bool)
    untouched[list(write_slots)] = False
    np.testing.assert_array_equal(new_state[layer][untouched], state[layer][untouched])
    np.testing.assert_array_equal(new_state[1 - layer], state[1 - layer])
    return out, new_state
