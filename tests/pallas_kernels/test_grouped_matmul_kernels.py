"""The kernels for TPU and GPU, interpreted on the CPU, against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import (
    EXPERTS,
    INNER,
    KERNELS,
    LAYERS,
    MODULES,
    WIDTH,
    check,
    expected,
    make_call,
    squared_relu,
    swiglu,
)

from pallas_kernels.grouped_matmul import ExpertBiases, tpu_few


@pytest.fixture(params=sorted(KERNELS))
def platform(request, monkeypatch):
    if request.param == "tpu, many tokens":
        monkeypatch.setattr(tpu_few, "fits", lambda x: False)
    return request.param


@pytest.fixture
def kernel(platform):
    return KERNELS[platform]


@pytest.mark.parametrize(("tokens", "invalid"), [(1, ()), (1, (0,)), (9, (0, 4)), (70, (69,)), (4, (0, 1, 2, 3))])
def test_agrees_with_the_reference(kernel, tokens, invalid):
    check(kernel, make_call(tokens, invalid))


def test_an_experts_rows_may_fill_several_tiles_and_others_have_none(kernel):
    check(kernel, make_call(75, experts=np.full((75, 1), 4), invalid=(2,)))


def test_a_layer_of_a_stack(kernel):
    check(kernel, make_call(9, layers=(LAYERS,)), layer=jnp.int32(1))


def test_experts_without_a_gate_and_with_biases(kernel):
    x, ids, weights, _, up, down, valid = make_call(9, (5,))
    rng = np.random.default_rng(3)
    biases = [jnp.asarray(rng.standard_normal((EXPERTS, width)), jnp.float32) for width in (INNER, INNER, WIDTH)]
    check(
        kernel,
        (x, ids, weights, None, up, down, valid),
        squared_relu,
        biases=ExpertBiases(None, *biases[1:]),
        atol=1e-4,
    )
    check(kernel, make_call(9, (5,)), biases=ExpertBiases(*biases), atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 9])
def test_assignments_to_experts_of_other_devices_add_nothing(kernel, tokens):
    x, ids, *rest = make_call(tokens)
    check(kernel, (x, ids - 3, *rest))


def test_bfloat16_is_as_good_as_bfloat16(kernel):
    call = tuple(x.astype(jnp.bfloat16) if x.ndim > 1 and x.dtype == jnp.float32 else x for x in make_call(40))
    out, right = kernel(*call, activation=swiglu), expected(*call, activation=swiglu)
    error = np.abs(np.asarray(out - right, np.float32)).max() / np.std(np.asarray(right, np.float32))
    assert 0 < error < 0.05


def test_two_runs_are_equal_to_the_bit(kernel):
    call = make_call(40)
    np.testing.assert_array_equal(kernel(*call, activation=swiglu), kernel(*call, activation=swiglu))


def test_what_cannot_be_tiled_is_refused(platform):
    accepts = MODULES[platform].accepts
    x, ids, weights, gate, up, down, valid = make_call(1)
    assert accepts(x, ids, weights, gate, up, down, valid) is None
    assert accepts(x, ids, weights, gate, up[:, :5], down, valid) == "inner width 5 is not a multiple of 8"
    assert accepts(x, ids, weights, tuple(gate), tuple(up), tuple(down), valid) == (
        "expert weights come as tuples, not stacked"
    )


def test_a_token_that_is_not_a_number_spoils_no_other(kernel):
    x, *rest = make_call(9)
    out, right = (np.asarray(kernel(rows, *rest, activation=swiglu)) for rows in (x.at[4].set(jnp.nan), x))
    assert np.isnan(out[4]).all()
    np.testing.assert_array_equal(np.delete(out, 4, 0), np.delete(right, 4, 0))
