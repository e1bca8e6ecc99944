"""Which form of the convolution and the delta rule a call gets, and that the forms agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_delta_cases import KINDS, SLOTS, make_arguments

from pallas_kernels import registry
from pallas_kernels.conv_gated_delta import OPERATOR, conv_gated_delta


def choices(kind, tokens, platform, **options):
    arguments = make_arguments(kind, tokens, **options)
    rows = jax.ShapeDtypeStruct((3,), jnp.int32)
    with registry.target(platform), registry.record() as recorder:
        jax.eval_shape(conv_gated_delta, *arguments, 1, rows, rows, rows)
    return {(choice.operator, choice.implementation, choice.fallback) for choice in recorder.choices()}


@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_are_one_kernel_on_a_tpu_and_two_on_a_gpu(kind):
    assert choices(kind, 5, "tpu") == {("conv_gated_delta", "pallas", False)}
    both = {("short_conv", "pallas", False), ("gated_delta", "pallas", False)}
    assert choices(kind, 5, "gpu") == {("conv_gated_delta", "pallas", False), *both}
    assert choices(kind, 5, "cpu") == {("conv_gated_delta", "xla", False)}


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_one_token_goes_to_the_kernels_of_one_token(platform):
    both = {("short_conv", "pallas", False), ("gated_delta", "pallas", False)}
    assert choices("per_channel", 1, platform) == both


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("per_head", {"taps": 10}, "10 taps are not 2 to 9"),
        ("per_channel", {"dim": 64}, "key_head_dim 64 is not a multiple of 128"),
    ],
)
def test_a_refusal_is_a_fallback_to_the_two_operators(kind, options, why):
    with pytest.warns(registry.KernelFallbackWarning) as caught:
        found = choices(kind, 5, "tpu", **options)
    assert ("conv_gated_delta", "pallas", True) in found
    assert {operator for operator, *_ in found} == {"conv_gated_delta", "short_conv", "gated_delta"}
    (own,) = [str(each.message) for each in caught if str(each.message).startswith("conv_gated_delta runs as pallas")]
    assert why in own


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_forced_forms_agree(kind, tokens):
    arguments = make_arguments(kind, tokens, dim=16)
    slots = (1, *map(jnp.array, ([3, 3, 5], [2, 1, 4], [tokens, 1, 0])))
    found = {}
    for name in ("xla", "reference"):
        with registry.force(name), registry.record() as recorder:
            found[name] = jax.jit(conv_gated_delta)(*arguments, *slots)
        assert {choice.implementation for choice in recorder.choices()} == {name}
    valid = np.arange(tokens) < np.array([tokens, 1, 0])[:, None]
    (out, *states), (right, *right_states) = found.values()
    assert out.dtype == arguments[0].dtype
    np.testing.assert_allclose(np.array(out)[valid], np.array(right)[valid], atol=3e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-6), states, right_states)
    (conv, *_), state = states
    untouched = np.setdiff1d(np.arange(SLOTS), [2, 1, 4])
    np.testing.assert_array_equal(state[1][untouched], arguments[5][1][untouched])
    np.testing.assert_array_equal(conv[1][untouched], arguments[2][0][1][untouched])
    np.testing.assert_array_equal(conv[1, 4], arguments[2][0][1, 5])


def test_pallas_cannot_be_forced_on_a_cpu():
    unavailable = pytest.raises(registry.KernelUnavailableError, match="conv_gated_delta: expected pallas")
    with registry.force("pallas", OPERATOR.name), unavailable:
        choices("per_head", 5, "cpu")


def test_checkpoint_lengths_come_with_slots():
    inputs, filters, conv, decay, beta, state = make_arguments("per_head", 5, dim=16)
    rows = jnp.array([3, 1, 5])
    call = functools.partial(conv_gated_delta, inputs, filters, conv, decay, beta, state, 1, rows, rows, rows)
    with pytest.raises(ValueError, match="checkpoint_lengths without checkpoint_slots: expected both"):
        call(checkpoint_lengths=jnp.ones((3, 1), int))
