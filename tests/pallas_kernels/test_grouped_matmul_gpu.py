"""The GPU kernels, interpreted on the CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import ExpertBiases, gpu, reference

WIDTH, INNER, EXPERTS, TOP, LAYERS = 128, 320, 7, 3, 2


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def squared_relu(gate, up):
    assert gate is None
    return jnp.square(jax.nn.relu(up))


kernel = jax.jit(functools.partial(gpu.routed_experts, interpret=True), static_argnames=["activation"])
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


@pytest.mark.parametrize(("tokens", "invalid"), [(1, ()), (1, (0,)), (9, (0, 4)), (70, (69,)), (4, (0, 1, 2, 3))])
def test_agrees_with_the_reference(tokens, invalid):
    check(make_call(tokens, invalid))


def test_an_experts_rows_may_fill_several_tiles_and_others_have_none():
    check(make_call(75, experts=np.full((75, 1), 4), invalid=(2,)))


@pytest.mark.parametrize(("width", "inner"), [(72, 136), (256, 128)])
@pytest.mark.parametrize("tokens", [5, 70])
def test_widths_that_blocks_do_and_do_not_divide(width, inner, tokens):
    """What a block has beyond the matrices counts for nothing, and beyond the outputs goes nowhere."""
    rng = np.random.default_rng(1)
    _, ids, weights, *_, valid = make_call(tokens, (3,))
    shapes = ((tokens, width), (EXPERTS, inner, width), (EXPERTS, inner, width), (EXPERTS, width, inner))
    wide, *stacks = (jnp.asarray(0.1 * rng.standard_normal(shape), jnp.float32) for shape in shapes)
    check((wide.at[3].set(jnp.nan), ids, weights, *stacks, valid))


def test_tiles_follow_the_mean_share():
    """Kimi Linear: one token, a decode of 64, prefills of 2,048 and 4,096; and widths of Nemotron 3 Nano."""
    shares = [gpu.tile_rows(assignments, 256, jnp.bfloat16) for assignments in (8, 512, 16384, 32768)]
    assert shares == [16, 16, 64, 128]
    assert gpu.tile_rows(32768, 256, jnp.float32) == 16
    assert gpu.tiling(16, 2, 1024, 2304) == gpu.Tiling(16, 64, 128)
    assert gpu.tiling(64, 2, 1024, 2304) == gpu.Tiling(64, 128, 64)
    assert gpu.tiling(128, 2, 1024, 2304) == gpu.Tiling(128, 64, 64)
    assert gpu.tiling(128, 1, 2304, 1024) == gpu.Tiling(128, 128, 64)
    assert gpu.tiling(128, 1, 1856, 2688) == gpu.Tiling(128, 64, 64)


@pytest.mark.parametrize("tokens", [1, 9])
def test_weights_of_experts_that_no_token_chose_are_not_read(tokens):
    call = make_call(tokens, experts=np.tile([[4, 1, 0]], (tokens, 1)))
    poisoned = [stack.at[jnp.array([2, 3, 5, 6])].set(jnp.nan) for stack in call[3:6]]
    check((*call[:3], *poisoned, call[6]))


def test_a_layer_of_a_stack():
    check(make_call(9, layers=(LAYERS,)), layer=jnp.int32(1))


def test_experts_without_a_gate_and_with_biases():
    x, ids, weights, _, up, down, valid = make_call(9, (5,))
    rng = np.random.default_rng(3)
    biases = [jnp.asarray(rng.standard_normal((EXPERTS, width)), jnp.float32) for width in (INNER, INNER, WIDTH)]
    check((x, ids, weights, None, up, down, valid), squared_relu, biases=ExpertBiases(None, *biases[1:]), atol=1e-4)
    check(make_call(9, (5,)), biases=ExpertBiases(*biases), atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 9])
def test_assignments_to_experts_of_other_devices_add_nothing(tokens):
    x, ids, *rest = make_call(tokens)
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
    assert gpu.accepts(x, ids, weights, gate, up, down, valid) is None
    assert gpu.accepts(x, ids, weights, gate, up[:, :5], down, valid) == "inner width 5 is not a multiple of 8"
    assert gpu.accepts(x, ids, weights, tuple(gate), tuple(up), tuple(down), valid) == (
        "expert weights come as tuples, not stacked"
    )
