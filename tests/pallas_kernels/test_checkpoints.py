"""States at requested boundaries within a prefill: XLA's form and the interpreted TPU kernels against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import TOKENS, expected, make_inputs, make_state
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_delta import gated_delta, tpu, xla
from pallas_kernels.short_conv import reference as short_conv_reference
from pallas_kernels.short_conv import tpu as short_conv_tpu
from pallas_kernels.short_conv import xla as short_conv_xla
from pallas_kernels.ssd import reference as ssd_reference
from pallas_kernels.ssd import tpu as ssd_tpu
from pallas_kernels.ssd import xla as ssd_xla

DELTA = {
    "xla": jax.jit(xla.gated_delta),
    "tpu": jax.jit(functools.partial(tpu.gated_delta, interpret=pltpu.InterpretParams())),
}


def check_delta(implementation, inputs, lengths, checkpoint_lengths, checkpoint_slots, read_slots=(3, 3, 5)):
    """Each checkpoint is the state of a call that ends there, everything else as without checkpoints."""
    state, writes = jnp.concatenate([make_state(1), make_state(2)], axis=1), [2, 1, 5]
    arguments = (*inputs.values(), state, 1, jnp.array(read_slots), jnp.array(writes))
    checkpoints = {"checkpoint_lengths": jnp.array(checkpoint_lengths), "checkpoint_slots": jnp.array(checkpoint_slots)}
    out, got = DELTA[implementation](*arguments, jnp.array(lengths), **checkpoints)
    right_out, right = expected(*arguments, jnp.array(lengths), **checkpoints)
    valid = np.arange(out.shape[1]) < np.array(lengths)[:, None]
    np.testing.assert_allclose(np.array(out)[valid], np.array(right_out)[valid], atol=3e-6, rtol=1e-5)
    np.testing.assert_allclose(got, right, atol=3e-6, rtol=1e-5)
    _, plain = DELTA[implementation](*arguments, jnp.array(lengths))
    others = np.setdiff1d(np.arange(state.shape[1]), np.ravel(checkpoint_slots))
    np.testing.assert_array_equal(got[:, others], plain[:, others])
    for number in range(len(checkpoint_lengths[0])):
        counts = [row[number] for row in checkpoint_lengths]
        _, ended = DELTA[implementation](*arguments, jnp.array(counts))
        for row, count in enumerate(counts):
            if count:
                slot = checkpoint_slots[row][number]
                np.testing.assert_allclose(got[1, slot], ended[1, writes[row]], atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "kind"),
    [
        ("xla", "per_head"),
        ("xla", "per_channel"),
        ("tpu", "per_head"),
        pytest.param("tpu", "per_channel", marks=pytest.mark.slow),
    ],
)
def test_gated_delta(implementation, kind):
    """Two in one chunk, at a chunk's edges, at a row's end, none; NaN in padding."""
    inputs, lengths = make_inputs(kind, TOKENS), [TOKENS, 100, 65]
    padding = np.arange(TOKENS) >= np.array(lengths)[:, None]
    inputs = {name: x.at[padding].set(jnp.nan) for name, x in inputs.items()}
    check_delta(implementation, inputs, lengths, [[1, 63], [64, 0], [65, 0]], [[4, 6], [8, 0], [7, 0]])


CONVOLUTION = {
    "xla": jax.jit(short_conv_xla.short_conv),
    "tpu": jax.jit(functools.partial(short_conv_tpu.short_conv, interpret=pltpu.InterpretParams())),
}


@pytest.mark.parametrize("implementation", CONVOLUTION)
@pytest.mark.parametrize(("tokens", "dtype"), [(300, jnp.float32), (5, jnp.bfloat16)])
def test_short_conv(implementation, tokens, dtype):
    """Fewer tokens than taps, at an edge of a block of 256 and beyond it, at the row's end, none."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    x, lengths = normal(3, tokens, 256), [tokens, tokens, 3]
    x = x.at[2, 3:].set(jnp.nan)
    arguments = (x, normal(256, 4), normal(2, 12, 3, 256), 1, *map(jnp.array, ([3, 3, 5], [2, 1, 5], lengths)))
    checkpoints = {
        "checkpoint_lengths": jnp.array([[1, min(tokens, 256)], [min(tokens, 257), 4], [3, 0]]),
        "checkpoint_slots": jnp.array([[4, 6], [8, 11], [7, 0]]),
    }
    y, got = CONVOLUTION[implementation](*arguments, **checkpoints)
    right_y, right = jax.jit(short_conv_reference.short_conv)(*arguments, **checkpoints)
    valid = np.arange(tokens) < np.array(lengths)[:, None]
    tolerance = {"atol": 3e-6, "rtol": 1e-2 if dtype == jnp.bfloat16 else 1e-5}
    np.testing.assert_allclose(*(np.array(value, np.float32)[valid] for value in (y, right_y)), **tolerance)
    np.testing.assert_array_equal(got, right)
    np.testing.assert_array_equal(got[1, 4, :2], arguments[2][1, 3, 1:])
    np.testing.assert_array_equal(got[1, 4, 2], x[0, 0])


@pytest.mark.parametrize("batch", [1, 3])
def test_xla_copies_no_state_array(batch):
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make_inputs("per_head", 70, batch=batch).values()]
    state = jax.ShapeDtypeStruct((2, 1000, 2, 128, 256), jnp.float32)
    row, checkpoint = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch,), (batch, 2)))

    def function(*arguments):
        *arguments, lengths, slots = arguments
        return gated_delta(*arguments, checkpoint_lengths=lengths, checkpoint_slots=slots)

    integers = (jax.ShapeDtypeStruct((), jnp.int32), row, row, row, checkpoint, checkpoint)
    compiled = jax.jit(function, donate_argnums=5).lower(*inputs, state, *integers).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < state.size * 4 / 10


SSD = {
    "xla": jax.jit(ssd_xla.ssd),
    "tpu": jax.jit(functools.partial(ssd_tpu.ssd, interpret=pltpu.InterpretParams())),
}


@pytest.mark.parametrize("implementation", SSD)
def test_ssd(implementation):
    """Two in one chunk, at edges of chunks of 32 and 64, at a row's end, none; NaN in padding."""
    run = SSD[implementation]
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    lengths = [70, 64, 33]
    padding = np.arange(70) >= np.array(lengths)[:, None]
    x, dt, B, C = (v.at[padding].set(jnp.nan) for v in (
        normal(3, 70, 4, 64), jax.nn.softplus(normal(3, 70, 4)), normal(3, 70, 2, 128) / 8, normal(3, 70, 2, 128) / 8,
    ))  # fmt: skip
    arguments = (x, dt, -jnp.exp(normal(4)), B, C, normal(4), normal(2, 12, 4, 64, 128), 1)
    integers = tuple(map(jnp.array, ([3, 3, 5], [2, 1, 5], lengths)))
    checkpoints = {
        "checkpoint_lengths": jnp.array([[1, 65], [32, 64], [33, 0]]),
        "checkpoint_slots": jnp.array([[4, 6], [8, 11], [7, 0]]),
    }
    y, got = run(*arguments, *integers, **checkpoints)
    right_y, right = jax.jit(ssd_reference.ssd)(*arguments, *integers, **checkpoints)
    np.testing.assert_allclose(np.array(y)[~padding], np.array(right_y)[~padding], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(got, right, atol=1e-5, rtol=1e-5)
    _, ended = run(*arguments, *integers[:2], jnp.array([65, 32, 33]))
    for row, slot in enumerate((6, 8, 7)):
        np.testing.assert_allclose(got[1, slot], ended[1, integers[1][row]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ({"checkpoint_lengths": jnp.ones((3, 2), int)}, "checkpoint_lengths without checkpoint_slots: expected both"),
        ({"checkpoint_slots": jnp.ones((3, 2), int)}, "checkpoint_slots without checkpoint_lengths: expected both"),
        (
            {"checkpoint_lengths": jnp.ones((3, 2), int), "checkpoint_slots": jnp.ones((3, 1), int)},
            r"expected one shape \[B, M\], got \(3, 2\) and \(3, 1\)",
        ),
    ],
)
def test_lengths_and_slots_come_together(checkpoints, message):
    arguments = (*make_inputs("per_head", 1).values(), make_state(), 0, *jnp.array([[1, 2, 3], [1, 2, 3], [1, 1, 1]]))
    with pytest.raises(ValueError, match=message):
        gated_delta(*arguments, **checkpoints)
    out, _ = gated_delta(*arguments)
    assert np.isfinite(out).all()
