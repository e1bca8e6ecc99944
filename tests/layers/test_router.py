"""Expert choice and weights against their definition, token by token in numpy."""

import dataclasses

import numpy as np
import pytest

from jaxhybrid.config import MoeSpec
from jaxhybrid.layers.router import route

RNG = np.random.default_rng(12)
TOKENS = 37
SOFTMAX = MoeSpec(
    num_experts=10, num_experts_per_tok=3, moe_intermediate_size=8, shared_intermediate_size=0,
    shared_expert_gate=False, scoring="softmax", norm_topk_prob=True,
)  # fmt: skip
SIGMOID = dataclasses.replace(SOFTMAX, num_experts=12, num_experts_per_tok=4, scoring="sigmoid")


def definition(scores: np.ndarray, bias: np.ndarray | None, spec: MoeSpec) -> dict[int, float]:
    """The experts of one token and their weights, in float64."""
    scores = scores.astype(np.float64)
    if spec.scoring == "softmax":
        gates = np.exp(scores - scores.max())
        gates /= gates.sum()
        choice = list(gates)
    else:
        gates = 1 / (1 + np.exp(-scores))
        choice = list(gates if bias is None else gates + bias)
    size = spec.num_experts // spec.n_group
    groups = [range(first, first + size) for first in range(0, spec.num_experts, size)]
    if spec.n_group > 1:
        groups.sort(key=lambda group: -sum(sorted((choice[expert] for expert in group), reverse=True)[:2]))
        groups = groups[: spec.topk_group]
    allowed = [expert for group in groups for expert in group]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: spec.num_experts_per_tok]
    total = sum(gates[expert] for expert in chosen) if spec.norm_topk_prob else 1.0
    return {expert: gates[expert] / total * spec.routed_scaling_factor for expert in chosen}


@pytest.mark.parametrize("bias_scale", [None, 0.0, 0.7])
@pytest.mark.parametrize(
    "spec",
    [
        SOFTMAX,
        dataclasses.replace(SOFTMAX, norm_topk_prob=False),
        SIGMOID,
        dataclasses.replace(SIGMOID, norm_topk_prob=False, routed_scaling_factor=2.446),
        dataclasses.replace(SIGMOID, n_group=4, topk_group=2),
        dataclasses.replace(SIGMOID, n_group=3, topk_group=1, routed_scaling_factor=1.7),
        dataclasses.replace(SIGMOID, n_group=2, topk_group=2),
    ],
)
def test_choice_and_weights_are_those_of_the_definition(spec: MoeSpec, bias_scale: float | None) -> None:
    if spec.scoring == "softmax" and bias_scale is not None:
        bias_scale = None  # softmax routers have no correction bias
    scores = RNG.normal(size=(TOKENS, spec.num_experts)).astype(np.float32) * 1.5
    bias = None
    if bias_scale is not None:
        bias = RNG.normal(size=spec.num_experts).astype(np.float32) * bias_scale
    experts, weights = map(np.asarray, route(scores, bias, spec))
    assert experts.shape == weights.shape == (TOKENS, spec.num_experts_per_tok)
    assert weights.dtype == np.float32
    for row in range(TOKENS):
        expected = definition(scores[row], bias, spec)
        assert set(experts[row].tolist()) == set(expected)
        assert weights[row] == pytest.approx([expected[expert] for expert in experts[row].tolist()], rel=2e-5)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    spec = dataclasses.replace(SIGMOID, num_experts_per_tok=1, norm_topk_prob=False)
    scores = np.zeros((1, 12), np.float32)
    scores[0, 3] = 5.0
    bias = np.zeros(12, np.float32)
    bias[8] = 9.0
    experts, weights = map(np.asarray, route(scores, bias, spec))
    assert experts.tolist() == [[8]]
    assert weights[0, 0] == pytest.approx(0.5)


def test_no_expert_outside_the_best_groups_is_chosen_though_it_scores_best() -> None:
    """One strong expert in a weak group loses to a group of two good ones."""
    spec = dataclasses.replace(SIGMOID, n_group=4, topk_group=1, num_experts_per_tok=2)
    scores = np.full((1, 12), -4.0, np.float32)
    scores[0, 0] = 6.0
    scores[0, [7, 8]] = 1.0
    experts, _ = map(np.asarray, route(scores, np.zeros(12, np.float32), spec))
    assert sorted(experts[0].tolist()) == [7, 8]


def test_a_token_nobody_wants_gets_finite_weights() -> None:
    _, weights = map(np.asarray, route(np.full((2, 12), -200.0, np.float32), None, SIGMOID))
    assert np.isfinite(weights).all()
