"""Which form of the convolutions and Mamba-2's recurrence a call gets, and that the forms agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_ssd_cases import SLOTS, make_arguments

from pallas_kernels import registry
from pallas_kernels.conv_ssd import OPERATOR, conv_ssd

BOTH = {("short_conv", "pallas", False), ("ssd", "pallas", False)}


def choices(tokens, platform, **options):
    rows = jax.ShapeDtypeStruct((3,), jnp.int32)
    with registry.target(platform), registry.record() as recorder:
        jax.eval_shape(conv_ssd, *make_arguments(tokens, **options), 1, rows, rows, rows)
    return {(choice.operator, choice.implementation, choice.fallback) for choice in recorder.choices()}


def test_many_tokens_are_one_kernel_on_a_tpu_and_two_on_a_gpu():
    assert choices(5, "tpu") == {("conv_ssd", "pallas", False)}
    assert choices(5, "gpu") == {("conv_ssd", "pallas", False), *BOTH}
    assert choices(5, "cpu") == {("conv_ssd", "xla", False)}


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_one_token_goes_to_the_kernels_of_one_token(platform):
    assert choices(1, platform) == BOTH


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"taps": 10}, "10 taps are not 2 to 9"),
        ({"width": 64}, "state_size 64 is not a multiple of 128"),
        ({"head_dim": 32}, "head_dim 32 is not a multiple of 64, for several tokens"),
        ({"groups": 8}, "1 heads a group are not even, for several tokens"),
    ],
)
def test_a_refusal_is_a_fallback_to_the_two_operators(options, why):
    with pytest.warns(registry.KernelFallbackWarning) as caught:
        found = choices(5, "tpu", **options)
    assert ("conv_ssd", "pallas", True) in found
    assert {operator for operator, *_ in found} == {"conv_ssd", "short_conv", "ssd"}
    (own,) = [str(each.message) for each in caught if str(each.message).startswith("conv_ssd runs as pallas")]
    assert why in own


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_forced_forms_agree(tokens, bias):
    arguments = make_arguments(tokens, heads=4, head_dim=16, width=8, bias=bias)
    slots = (1, *map(jnp.array, ([3, 3, 5], [2, 1, 4], [tokens, 1, 0])))
    found = {}
    for name in ("xla", "reference"):
        with registry.force(name), registry.record() as recorder:
            found[name] = jax.jit(conv_ssd)(*arguments, *slots)
        assert {choice.implementation for choice in recorder.choices()} == {name}
    valid = np.arange(tokens) < np.array([tokens, 1, 0])[:, None]
    (out, *states), (right, *right_states) = found.values()
    assert out.dtype == arguments[0][0].dtype
    np.testing.assert_allclose(np.array(out)[valid], np.array(right)[valid], atol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), states, right_states)
    conv, state = states
    untouched = np.setdiff1d(np.arange(SLOTS), [2, 1, 4])
    for new, old in zip((*conv, state), (*arguments[3], arguments[-1]), strict=True):
        np.testing.assert_array_equal(new[1][untouched], old[1][untouched])
        np.testing.assert_array_equal(new[1, 4], old[1, 5])


def test_pallas_cannot_be_forced_on_a_cpu():
    unavailable = pytest.raises(registry.KernelUnavailableError, match="conv_ssd: expected pallas")
    with registry.force("pallas", OPERATOR.name), unavailable:
        choices(5, "cpu")


def test_checkpoint_lengths_come_with_slots():
    rows = jnp.array([3, 1, 5])
    with pytest.raises(ValueError, match="checkpoint_lengths without checkpoint_slots: expected both"):
        conv_ssd(*make_arguments(5), 1, rows, rows, rows, checkpoint_lengths=jnp.ones((3, 1), int))
