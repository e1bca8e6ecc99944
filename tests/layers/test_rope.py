"""Rotary scalings against the values that transformers 5.24 computes for the same config.json keys."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxhybrid.config import DynamicScaling, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from jaxhybrid.layers.rope import attention_factor, frequencies, rotate

RECORDED = json.loads((Path(__file__).parent / "rope_scalings.json").read_text())
KINDS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


def spec_of(case):
    values = dict(case["rope_parameters"])
    kind, theta = values.pop("rope_type"), values.pop("rope_theta")
    width = int(case["head_dim"] * values.pop("partial_rotary_factor", 1))
    if kind == "dynamic":
        return RopeSpec(theta, width, scaling=DynamicScaling(values["factor"], case["max_position_embeddings"]))
    return RopeSpec(theta, width, scaling=KINDS[kind](**values))


def name_of(case):
    return f"{case['rope_parameters']['rope_type']}-{case['head_dim']}-{case['seq_len']}"


def angles_of(rope, position):
    """The angles that a head turns by, read off what becomes of unit vectors."""
    half = rope.rotary_dim // 2
    vectors = jnp.zeros((1, 1, half, rope.rotary_dim)).at[0, 0, jnp.arange(half), jnp.arange(half)].set(1.0)
    turned = np.asarray(rotate(vectors, jnp.full((1, 1), position), rope))[0, 0]
    return np.arctan2(turned[np.arange(half), half + np.arange(half)], turned[np.arange(half), np.arange(half)])


@pytest.mark.parametrize("case", [case for case in RECORDED if case["seq_len"] is None], ids=name_of)
def test_frequencies_and_factor(case):
    rope = spec_of(case)
    np.testing.assert_allclose(frequencies(rope), case["inv_freq"], rtol=3e-6)
    assert attention_factor(rope) == pytest.approx(case["attention_factor"], rel=1e-6)
    assert not np.allclose(frequencies(rope), frequencies(RopeSpec(rope.theta, rope.rotary_dim)), rtol=1e-3)


@pytest.mark.parametrize("case", [case for case in RECORDED if case["seq_len"] is not None], ids=name_of)
def test_dynamic_scaling_turns_a_position_as_a_sequence_that_ends_with_it(case):
    position = case["seq_len"] - 1
    expected = position * np.array(case["inv_freq"])
    difference = angles_of(spec_of(case), position) - expected
    np.testing.assert_allclose(np.remainder(difference + np.pi, 2 * np.pi) - np.pi, 0, atol=5e-4)


def test_the_attention_factor_is_on_cos_and_sin():
    rope = RopeSpec(1e4, 12, scaling=YarnScaling(4.0, 64))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 5, 14)).astype(np.float32))
    turned = rotate(x, jnp.arange(6).reshape(2, 3), rope)
    norms = jnp.linalg.norm(turned[..., :12], axis=-1) / jnp.linalg.norm(x[..., :12], axis=-1)
    np.testing.assert_allclose(norms, 0.1 * np.log(4) + 1, rtol=1e-6)
    np.testing.assert_array_equal(turned[..., 12:], x[..., 12:])


def test_interleaved_pairs_are_neighbours():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4, 3, 10)).astype(np.float32))
    positions = jnp.arange(4)[None] * 7
    halves = jnp.concatenate([x[..., 0:8:2], x[..., 1:8:2], x[..., 8:]], axis=-1)
    expected = rotate(halves, positions, RopeSpec(100.0, 8))
    got = rotate(x, positions, RopeSpec(100.0, 8, interleaved=True))
    np.testing.assert_allclose(
        jnp.concatenate([got[..., 0:8:2], got[..., 1:8:2], got[..., 8:]], -1), expected, atol=1e-6
    )


def test_rotation_by_complex_numbers():
    """The definition: pair i as a complex number, times e^(i position frequency)."""
    x = np.random.default_rng(2).standard_normal((1, 5, 2, 6)).astype(np.float32)
    positions = np.array([[0, 1, 9, 300, 5]])
    turn = np.exp(1j * positions[..., None] * 50.0 ** (-np.arange(3) / 3))[:, :, None]
    expected = (x[..., :3] + 1j * x[..., 3:]) * turn
    got = np.asarray(rotate(jnp.asarray(x), jnp.asarray(positions), RopeSpec(50.0, 6)))
    np.testing.assert_allclose(got, np.concatenate([expected.real, expected.imag], -1), atol=1e-4)
