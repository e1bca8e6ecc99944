import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import registry
from pallas_kernels.grouped_matmul import ExpertBiases, ragged, reference, routed_experts, xla

DIM, INNER, EXPERTS, TOP = 6, 10, 5, 3


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def squared_relu(gate, up):
    assert gate is None
    return jnp.square(jax.nn.relu(up))


jitted = jax.jit(routed_experts, static_argnames="activation")


def make_call(tokens, *, tuples=True, seed=0, experts=None, invalid=()):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, DIM)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(tokens)]) if experts is None else experts
    valid = ~np.isin(np.arange(tokens), invalid)
    x[~valid] = np.nan
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    weights[~valid] = np.nan
    shapes = ((INNER, DIM), (INNER, DIM), (DIM, INNER))
    matrices = [rng.standard_normal((EXPERTS, *shape)).astype(np.float32) for shape in shapes]
    stacks = [tuple(map(jnp.asarray, matrix)) if tuples else jnp.asarray(matrix) for matrix in matrices]
    return jnp.asarray(x), jnp.asarray(ids, jnp.int32), jnp.asarray(weights), *stacks, jnp.asarray(valid)


def by_hand(call):
    """In float64 NumPy, valid rows only."""
    x, ids, weights, gate, up, down, valid = jax.tree.map(np.asarray, call)
    out = np.zeros(x.shape)
    for n in np.flatnonzero(valid):
        for expert, weight in zip(ids[n], weights[n], strict=True):
            g, u = (matrix[expert].astype(float) @ x[n] for matrix in (gate, up))
            out[n] += weight * (down[expert].astype(float) @ (g / (1 + np.exp(-g)) * u))
    return out


def run(kind, call):
    with registry.force(kind):
        return jitted(*call, activation=swiglu)


@pytest.mark.parametrize("kind", ["xla", "reference"])
@pytest.mark.parametrize("tuples", [True, False])
@pytest.mark.parametrize(("tokens", "invalid"), [(1, ()), (5, (0, 3)), (50, (3, 48, 49)), (4, (0, 1, 2, 3))])
def test_matches_definition(kind, tuples, tokens, invalid):
    call = make_call(tokens, tuples=tuples, invalid=invalid)
    out = run(kind, call)
    np.testing.assert_allclose(out, by_hand(call), atol=1e-4)
    assert (out[jnp.array(invalid, int)] == 0).all()


@pytest.mark.parametrize("kind", ["xla", "reference"])
def test_all_tokens_on_one_expert(kind):
    call = make_call(33, experts=np.full((33, 1), 4), invalid=(2,))
    np.testing.assert_allclose(run(kind, call), by_hand(call), atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), invalid=st.sets(st.integers(0, 8)))
def test_any_routing(seed, invalid):
    call = make_call(9, seed=seed, invalid=tuple(invalid))
    np.testing.assert_allclose(run("xla", call), by_hand(call), atol=1e-4)


@pytest.mark.parametrize(("tokens", "invalid"), [(1, ()), (7, (0, 4)), (4, (0, 1, 2, 3))])
def test_ragged_matches_definition(tokens, invalid):
    call = make_call(tokens, tuples=False, invalid=invalid)
    np.testing.assert_allclose(
        jax.jit(ragged.routed_experts, static_argnames="activation")(*call, activation=swiglu), by_hand(call), atol=1e-4
    )


@pytest.mark.parametrize("kind", ["xla", "ragged"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 40])
def test_biases_and_experts_without_a_gate_match_the_reference(kind, gated, tokens):
    x, ids, weights, gate, up, down, valid = make_call(tokens, tuples=kind == "xla", invalid=(1, 7)[: tokens // 2])
    rng = np.random.default_rng(3)
    bias = [jnp.asarray(rng.standard_normal((EXPERTS, width)), jnp.float32) for width in (INNER, INNER, DIM)]
    biases = ExpertBiases(bias[0] if gated else None, *bias[1:])
    call = (x, ids, weights, gate if gated else None, up, down, valid)
    options = {"activation": swiglu if gated else squared_relu, "biases": biases}
    function = ragged.routed_experts if kind == "ragged" else xla.routed_experts
    expected = reference.routed_experts(*call, **options)
    assert np.abs(expected - reference.routed_experts(*call, activation=options["activation"])).max() > 0.1
    got = jax.jit(function, static_argnames="activation")(*call, **options)
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_choice_on_a_cpu_says_why():
    with registry.record() as recorder:
        routed_experts(*make_call(2), activation=swiglu)
    (plain,) = recorder.choices()
    assert plain.implementation == "xla"
    with registry.force("pallas"), pytest.raises(registry.KernelUnavailableError, match="routed_experts"):
        routed_experts(*make_call(2), activation=swiglu)


def test_unchosen_and_invalid_experts_are_not_computed():
    """NaN weights of experts that only invalid rows chose stay out."""
    call = make_call(6, experts=np.array([[0], [1], [0], [3], [1], [0]]), invalid=(3,))
    poisoned = [tuple(matrix if e < 2 else matrix * np.nan for e, matrix in enumerate(stack)) for stack in call[3:6]]
    np.testing.assert_allclose(run("xla", (*call[:3], *poisoned, call[6])), by_hand(call), atol=1e-4)


def test_weights_are_not_copied_in_a_decode_loop():
    call = make_call(1)

    def decode(x, *arguments):
        return jax.lax.fori_loop(0, x.shape[1], lambda _, x: x + routed_experts(x, *arguments, activation=swiglu), x)

    program = jax.jit(decode).lower(*call).compile().as_text()
    shapes = [f"f32[{INNER},{DIM}]", f"f32[{DIM},{INNER}]"]
    assert all(shape in program for shape in shapes)
    assert not [line for line in program.splitlines() if "copy(" in line and any(s in line for s in shapes)]


def test_block_rows_follow_the_mean_share():
    assert xla.block_rows(2, 8) == 1
    assert xla.block_rows(16, 8) == 1
    assert xla.block_rows(17, 8) == 4
    assert xla.block_rows(100, 8) == 32
    assert xla.block_rows(4096, 8) == xla.MAX_BLOCK_ROWS


def test_bfloat16():
    call = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, make_call(7))
    call = (*call[:2], call[2].astype(jnp.float32), *call[3:])
    out = run("xla", call)
    assert out.dtype == jnp.bfloat16
    expected = np.asarray(run("reference", call), np.float32)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=0.02 * expected.std(), rtol=0.02)
