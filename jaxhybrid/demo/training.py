"""How the demo model is trained: losses, optimiser, schedule, and one step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxhybrid.demo.architecture import CONFIG
from jaxhybrid.demo.training_model import Parameters, forward, parameter_shapes


@dataclass(frozen=True)
class Recipe:
    """Warm-up, constant rate, linear decay to zero over the last `decay_steps` of `steps`, on longer windows."""

    steps: int = 880
    decay_steps: int = 176
    warmup_steps: int = 40
    batch_tokens: int = 2048
    window: int = 512
    decay_window: int = 1024
    mtp_rows: int = 1  # rows of a batch that train the multi-token-prediction layer
    mtp_weight: float = 0.2
    muon_rate: float = 0.02
    adam_rate: float = 0.003
    balance_rate: float = 0.005  # step of the routers' correction biases
    training_conversations: int = 240
    seed: int = 0

    def rate(self, step: Array | int) -> Array:
        """Factor of the learning rates, from 0 to 1."""
        up = jnp.minimum(1.0, (step + 1) / self.warmup_steps)
        return up * jnp.clip((self.steps - step) / self.decay_steps, 0.0, 1.0)

    def phase(self, step: int) -> tuple[int, int]:
        """The window of the phase that `step` is in, and the step at which the phase ends."""
        decay_from = self.steps - self.decay_steps
        return (self.window, decay_from) if step < decay_from else (self.decay_window, self.steps)


Step = Callable[[Parameters, Any, Int[Array, "B T"], Array], tuple[Parameters, Any, dict[str, Array]]]


def make_optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """Muon for the matrices of the layers; AdamW for embedding, routers, convolutions and vectors."""
    axes = {name: _matrix_axes(name, len(shape)) for name, shape in parameter_shapes().items()}
    muon = optax.contrib.muon(
        learning_rate=lambda step: recipe.muon_rate * recipe.rate(step),
        adam_learning_rate=lambda step: recipe.adam_rate * recipe.rate(step),
        adam_b2=0.95,
        weight_decay=0.01,
        muon_weight_dimension_numbers=axes,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def _matrix_axes(name: str, ndim: int) -> optax.contrib.MuonDimensionNumbers | None:
    """The last two axes are outputs and inputs; an axis before them counts experts."""
    if ndim < 2 or "embed_tokens" in name or "conv1d" in name or name.endswith((".gate.weight", ".b_proj.weight")):
        return None
    return optax.contrib.MuonDimensionNumbers(reduction_axis=ndim - 1, output_axis=ndim - 2)


def make_step(recipe: Recipe, optimiser: optax.GradientTransformation) -> Step:
    """A compiled step: (parameters, optimiser state, tokens, step number) to the next ones and what to report."""

    @jax.jit
    def step(
        params: Parameters, state: Any, tokens: Int[Array, "B T"], number: Array
    ) -> tuple[Parameters, Any, dict[str, Array]]:
        losses = jax.value_and_grad(lambda p: training_loss(p, tokens, recipe), has_aux=True)
        (_, (report, loads)), gradients = losses(params)
        updates, state = optimiser.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        fair = CONFIG["num_experts_per_token"] / CONFIG["num_experts"]
        pace = recipe.balance_rate * recipe.rate(number)
        params |= {name: params[name] + pace * jnp.sign(fair - load) for name, load in loads.items()}
        return params, state, report

    return step


def training_loss(
    params: Parameters, tokens: Int[Array, "B T"], recipe: Recipe
) -> tuple[Float[Array, ""], tuple[dict[str, Array], dict[str, Array]]]:
    logits, further, loads = forward(params, tokens, recipe.mtp_rows)
    main = cross_entropy(logits[:, :-1], tokens[:, 1:])
    mtp = cross_entropy(further[:, :-1], tokens[: recipe.mtp_rows, 2:])
    report = {"loss": main, "mtp": mtp, "most_used": jnp.stack(list(loads.values())).max()}
    return main + recipe.mtp_weight * mtp, (report, loads)


def cross_entropy(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean negative log-likelihood in nats a token."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets.astype(jnp.int32)).mean()
