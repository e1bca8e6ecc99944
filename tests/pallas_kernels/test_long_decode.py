"""65,536 decode steps in float32 against float64: the error must not grow with the number of steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.selective_scan import selective_scan
from pallas_kernels.ssd import ssd

STEPS, WINDOW = 65_536, 8_192
HEADS, KEY_DIM, VALUE_DIM, STATE, GROUPS = 4, 10, 12, 14, 2
SLOTS = jnp.array([1])


def decode(step, per_token, state):
    """Runs `step(token, state) -> (out, state)` over all tokens; returns outputs and the state after each window."""

    def body(state, token):
        out, state = step({name: value[None, None] for name, value in token.items()}, state)
        return state, out[0, 0]

    def window(state, tokens):
        state, out = jax.lax.scan(body, state, tokens)
        return state, (out, state[0, 1])

    windows = {name: jnp.asarray(x, jnp.float32).reshape(-1, WINDOW, *x.shape[1:]) for name, x in per_token.items()}
    _, (out, states) = jax.jit(lambda s: jax.lax.scan(window, s, windows))(state)
    return np.asarray(out).reshape(STEPS, *out.shape[2:]), np.asarray(states)


def exact_decode(step, per_token, shape):
    """The same in float64, `step(token, state) -> (out, state)`, from the same float32 inputs."""
    wide = {name: x.astype(np.float32).astype(np.float64) for name, x in per_token.items()}
    state, outs, states = np.zeros(shape), [], []
    for t in range(STEPS):
        out, state = step({name: x[t] for name, x in wide.items()}, state)
        outs.append(out)
        if (t + 1) % WINDOW == 0:
            states.append(state)
    return np.stack(outs), np.stack(states)


def check(got, want):
    """The last windows' error is that of the first, and small throughout."""
    (out, states), (exact_out, exact_states) = got, want
    size = np.abs(exact_out).std()
    errors = np.abs(out - exact_out).reshape(STEPS // WINDOW, -1).max(axis=1) / size
    state_errors = np.abs(states - exact_states).reshape(len(states), -1).max(axis=1) / np.abs(exact_states).std()
    for name, error in (("output", errors), ("state", state_errors)):
        assert error.max() < 1e-5, f"{name}: {error}"
        assert error[-4:].mean() < 1.5 * error[:4].mean(), f"{name} error grows: {error}"


def log_decays(rng, *shape):
    """Of each token, from -1e-3 (a memory of a thousand tokens) to -3; the rates differ by head or channel."""
    return -np.exp(
        rng.uniform(-0.5, 0.5, (STEPS, *shape))
        + np.linspace(np.log(1e-3), np.log(3), shape[0])[(slice(None), *(None,) * (len(shape) - 1))]
    )


@pytest.mark.slow
@pytest.mark.parametrize("decay_dims", [(), (KEY_DIM,)], ids=["gated_delta_net", "kimi_delta"])
def test_gated_delta(decay_dims):
    rng = np.random.default_rng(0)
    per_token = {
        "q": rng.standard_normal((STEPS, HEADS, KEY_DIM)),
        "k": rng.standard_normal((STEPS, HEADS, KEY_DIM)),
        "v": rng.standard_normal((STEPS, HEADS, VALUE_DIM)),
        "log_decay": log_decays(rng, HEADS, *decay_dims),
        "beta": rng.uniform(0, 1, (STEPS, HEADS)),
    }

    def step(token, state):
        inputs = (token[name] for name in ("q", "k", "v", "log_decay", "beta"))
        return gated_delta(*inputs, state, 0, SLOTS, SLOTS, jnp.array([1]))

    def unit(x):
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    def exact(token, S):
        k = unit(token["k"])
        decay = np.exp(token["log_decay"])
        S = decay.reshape(HEADS, -1, 1) * S
        u = token["beta"][:, None] * (token["v"] - np.einsum("hkv,hk->hv", S, k))
        S = S + k[:, :, None] * u[:, None]
        return np.einsum("hkv,hk->hv", S, unit(token["q"]) * KEY_DIM**-0.5), S

    state = jnp.zeros((1, 2, HEADS, KEY_DIM, VALUE_DIM))
    check(decode(step, per_token, state), exact_decode(exact, per_token, state.shape[2:]))


@pytest.mark.slow
def test_ssd():
    rng = np.random.default_rng(1)
    rates, D = np.exp(rng.standard_normal(HEADS)).astype(np.float32), rng.standard_normal(HEADS).astype(np.float32)
    per_token = {
        "x": rng.standard_normal((STEPS, HEADS, VALUE_DIM)),
        "dt": -log_decays(rng, HEADS) / rates,
        "B": rng.standard_normal((STEPS, GROUPS, STATE)),
        "C": rng.standard_normal((STEPS, GROUPS, STATE)),
    }

    def step(token, state):
        x, dt, B, C = (token[name] for name in ("x", "dt", "B", "C"))
        return ssd(x, dt, -jnp.asarray(rates), B, C, jnp.asarray(D), state, 0, SLOTS, SLOTS, jnp.array([1]))

    def exact(token, h):
        B, C = (np.repeat(token[name], HEADS // GROUPS, axis=0) for name in "BC")
        update = token["dt"][:, None] * token["x"]
        h = np.exp(-token["dt"] * rates)[:, None, None] * h + update[:, :, None] * B[:, None]
        return np.einsum("hpn,hn->hp", h, C) + D[:, None] * token["x"], h

    state = jnp.zeros((1, 2, HEADS, VALUE_DIM, STATE))
    check(decode(step, per_token, state), exact_decode(exact, per_token, state.shape[2:]))


@pytest.mark.slow
def test_selective_scan():
    rng = np.random.default_rng(2)
    rates = np.exp(rng.standard_normal((STATE, HEADS)) / 2).astype(np.float32)
    D = rng.standard_normal(HEADS).astype(np.float32)
    per_token = {
        "x": rng.standard_normal((STEPS, HEADS)),
        "dt": -log_decays(rng, HEADS),
        "B": rng.standard_normal((STEPS, STATE)),
        "C": rng.standard_normal((STEPS, STATE)),
    }

    def step(token, state):
        x, dt, B, C = (token[name] for name in ("x", "dt", "B", "C"))
        return selective_scan(x, dt, -jnp.asarray(rates), B, C, jnp.asarray(D), state, 0, SLOTS, SLOTS, jnp.array([1]))

    def exact(token, h):
        h = np.exp(-token["dt"] * rates) * h + token["B"][:, None] * (token["dt"] * token["x"])
        return token["C"] @ h + D * token["x"], h

    state = jnp.zeros((1, 2, STATE, HEADS))
    check(decode(step, per_token, state), exact_decode(exact, per_token, state.shape[2:]))
