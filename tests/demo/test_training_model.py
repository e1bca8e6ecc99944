"""The form of the model that is trained is the model that is served."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxhybrid.demo.corpus import training_batches
from jaxhybrid.demo.export import export
from jaxhybrid.demo.training import Recipe, make_optimiser, make_step, training_loss
from jaxhybrid.demo.training_model import Parameters, forward, initial_parameters, parameter_shapes
from jaxhybrid.model import forward as serve
from jaxhybrid.model import load_model

TINY = Recipe(steps=8, decay_steps=2, warmup_steps=1, window=32, batch_tokens=64)


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    """Every parameter off its initial constant, and representable in bfloat16."""
    start = initial_parameters(jax.random.key(3))
    keys = dict(zip(start, jax.random.split(jax.random.key(4), len(start)), strict=True))
    moved = {name: p + 0.1 * jax.random.normal(keys[name], p.shape) * jnp.std(p) for name, p in start.items()}
    moved |= {n: p + 0.1 * jax.random.normal(keys[n], p.shape) for n, p in moved.items() if p.ndim == 1}
    return {name: p.astype(jnp.bfloat16).astype(jnp.float32) for name, p in moved.items()}


def test_logits_agree_with_the_runtime(parameters, tmp_path):
    export(parameters, tmp_path)
    model = load_model(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 4096, 96)
    trained = forward(parameters, jnp.asarray(tokens)[None], 1)[0][0]
    served = serve(model, tokens)
    assert float(jnp.abs(trained - served).max()) <= 2e-4 * float(jnp.std(served))
    assert model.parameter_count == sum(int(np.prod(shape)) for shape in parameter_shapes().values())
    assert 5e6 < model.parameter_count < 10e6


def test_a_prediction_does_not_see_what_it_predicts(parameters):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 4096, (1, 24)))
    logits, further, _ = forward(parameters, tokens, 1)
    changed = forward(parameters, tokens.at[0, 20].set(7), 1)
    np.testing.assert_allclose(changed[0][0, :20], logits[0, :20], atol=1e-4)
    np.testing.assert_allclose(changed[1][0, :19], further[0, :19], atol=1e-4)
    assert float(jnp.abs(changed[0][0, 20] - logits[0, 20]).max()) > 1e-2


@pytest.mark.slow
def test_steps_lower_the_loss_and_move_every_parameter():
    stream = np.random.default_rng(2).integers(0, 50, 640).astype(np.uint16)
    optimiser = make_optimiser(TINY)
    step = make_step(TINY, optimiser)
    start = initial_parameters(jax.random.key(0))
    parameters, state = start, optimiser.init(start)
    for number, tokens in zip(range(6), training_batches(stream, 32, 2, 0), strict=False):
        tokens = jnp.asarray(tokens, jnp.int32)
        parameters, state, report = step(parameters, state, tokens, number)
    before, _ = training_loss(start, tokens, TINY)
    assert float(report["loss"]) < float(before) - 0.5
    assert [name for name in start if bool((parameters[name] == start[name]).all())] == []


def test_the_rate_warms_up_holds_and_decays_to_zero():
    recipe = Recipe(steps=100, decay_steps=20, warmup_steps=10)
    rates = [float(recipe.rate(step)) for step in (0, 9, 50, 79, 90, 100)]
    np.testing.assert_allclose(rates, [0.1, 1, 1, 1, 0.5, 0], atol=1e-6)
    assert recipe.phase(79) == (recipe.window, 80)
    assert recipe.phase(80) == (recipe.decay_window, 100)
