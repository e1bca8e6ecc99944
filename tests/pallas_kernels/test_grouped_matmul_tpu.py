"""The TPU kernel, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import ExpertBiases, reference, tpu

WIDTH, INNER, EXPERTS, TOP, LAYERS = 128, 320, 7, 3, 2


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def squared_relu(gate, up):
    assert gate is None
    return jnp.square(jax.nn.relu(up))


kernel = jax.jit(
    functools.partial(tpu.routed_experts, interpret=pltpu.InterpretParams()), static_argnames=["activation"]
)
expected = jax.jit(reference.routed_experts, static_argnames=["activation"])


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


def check(call, activation=swiglu, atol=2e-5, **options):
    out = kernel(*call, activation=activation, **options)
    np.testing.assert_allclose(out, expected(*call, activation=activation, **options), atol=atol, rtol=1e-5)
    assert (np.asarray(out)[~np.asarray(call[-1])] == 0).all()
    return out


@pytest.mark.parametrize(("tokens", "invalid"), [(1, ()), (9, (0, 4)), (70, (69,)), (4, (0, 1, 2, 3))])
def test_agrees_with_the_reference(tokens, invalid):
    check(make_call(tokens, invalid))


def test_an_experts_rows_may_fill_several_tiles_and_others_have_none():
    check(make_call(75, experts=np.full((75, 1), 4), invalid=(2,)))


def test_an_inner_width_in_parts_that_do_not_divide_it(monkeypatch):
    """320 inner channels as 128, 128 and 64: what the last part reads beyond the matrices counts for nothing."""
    monkeypatch.setattr(tpu, "BLOCK_BYTES", 3 * WIDTH * 4 * 128)
    assert tpu.tiling(60, EXPERTS, INNER, WIDTH, 3 * WIDTH * 4) == (32, 128)
    run = jax.jit(functools.partial(tpu.routed_experts, interpret=pltpu.InterpretParams(), activation=swiglu))
    call = make_call(20, (3,))
    np.testing.assert_allclose(run(*call), expected(*call, activation=swiglu), atol=2e-5, rtol=1e-5)


def test_a_layer_of_a_stack():
    check(make_call(9, layers=(LAYERS,)), layer=jnp.int32(1))


def test_experts_without_a_gate_and_with_biases():
    x, ids, weights, _, up, down, valid = make_call(9, (5,))
    rng = np.random.default_rng(3)
    biases = [jnp.asarray(rng.standard_normal((EXPERTS, width)), jnp.float32) for width in (INNER, INNER, WIDTH)]
    check((x, ids, weights, None, up, down, valid), squared_relu, biases=ExpertBiases(None, *biases[1:]), atol=1e-4)
    check(make_call(9, (5,)), biases=ExpertBiases(*biases), atol=1e-4)


def test_assignments_to_experts_of_other_devices_add_nothing():
    x, ids, *rest = make_call(9)
    check((x, ids - 3, *rest))


def test_bfloat16_is_as_good_as_bfloat16():
    call = tuple(x.astype(jnp.bfloat16) if x.ndim > 1 and x.dtype == jnp.float32 else x for x in make_call(40))
    out, right = kernel(*call, activation=swiglu), expected(*call, activation=swiglu)
    error = np.abs(np.asarray(out - right, np.float32)).max() / np.std(np.asarray(right, np.float32))
    assert 0 < error < 0.05


def test_two_runs_are_equal_to_the_bit():
    call = make_call(40)
    np.testing.assert_array_equal(kernel(*call, activation=swiglu), kernel(*call, activation=swiglu))


def test_what_cannot_be_tiled_is_refused():
    x, ids, weights, gate, up, down, valid = make_call(1)
    assert tpu.accepts(x, ids, weights, gate, up, down, valid) is None
    assert tpu.accepts(x, ids, weights, gate, up[:, :5], down, valid) == "inner width 5 is not a multiple of 8"
    assert tpu.accepts(x, ids, weights, tuple(gate), tuple(up), tuple(down), valid) == (
        "expert weights come as tuples, not stacked"
    )
