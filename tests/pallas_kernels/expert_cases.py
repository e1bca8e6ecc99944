"""Calls of `routed_experts`, what they must give, and its kernels interpreted on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import gpu, reference, tpu

WIDTH, INNER, EXPERTS, TOP, LAYERS = 128, 320, 7, 3, 2


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def squared_relu(gate, up):
    assert gate is None
    return jnp.square(jax.nn.relu(up))


expected = jax.jit(reference.routed_experts, static_argnames=["activation"])
MODULES = {"tpu": tpu, "tpu, many tokens": tpu, "gpu": gpu}
INTERPRETERS = {tpu: pltpu.InterpretParams(), gpu: True}
KERNELS = {
    name: jax.jit(
        functools.partial(module.routed_experts, interpret=INTERPRETERS[module]), static_argnames=["activation"]
    )
    for name, module in MODULES.items()
}


def make_call(tokens, invalid=(), seed=0, experts=None, layers=()):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(tokens)]) if experts is None else experts
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    valid = ~np.isin(np.arange(tokens), invalid)
    x[~valid], weights[~valid] = np.nan, np.nan
    shapes = ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
    stacks = [0.1 * rng.standard_normal((*layers, EXPERTS, *shape)).astype(np.float32) for shape in shapes]
    return tuple(map(jnp.asarray, (x, ids.astype(np.int32), weights, *stacks, valid)))


def check(kernel, call, activation=swiglu, atol=2e-5, **options):
    out = kernel(*call, activation=activation, **options)
    np.testing.assert_allclose(out, expected(*call, activation=activation, **options), atol=atol, rtol=1e-5)
    assert (np.asarray(out)[~np.asarray(call[-1])] == 0).all()
