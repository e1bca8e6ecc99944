"""Schedules as repeated patterns: nothing lost, and depth folded where it repeats."""

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxhybrid.config import DenseSpec, KimiDeltaSpec, LatentAttentionSpec, LayerSpec, ModelConfig
from jaxhybrid.layers.segments import MAX_PERIOD, SegmentPlan, plan_segments
from jaxhybrid.models import translate

CONFIGS = Path(__file__).parents[2] / "configs"
KINDS = (
    LayerSpec(KimiDeltaSpec(2, 3, 4), DenseSpec(5)),
    LayerSpec(LatentAttentionSpec(2, None, 6, 3, 2, 4, False), DenseSpec(5)),
    LayerSpec(KimiDeltaSpec(2, 3, 4), DenseSpec(7)),
)


def schedule(letters: str) -> tuple[LayerSpec, ...]:
    return tuple(KINDS["klm".index(letter)] for letter in letters)


def shape(plans: tuple[SegmentPlan, ...]) -> list[tuple[int, int, int]]:
    """(first layer, layers of the pattern, repeats) of each."""
    return [(plan.first, len(plan.pattern), plan.repeats) for plan in plans]


def published(name: str) -> ModelConfig:
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    return translate(values, name)


SCHEDULES = st.one_of(
    st.lists(st.sampled_from(KINDS), max_size=20),
    st.builds(
        lambda head, pattern, repeats, tail: [*head, *pattern * repeats, *tail],
        st.lists(st.sampled_from(KINDS), max_size=3),
        st.lists(st.sampled_from(KINDS), min_size=1, max_size=MAX_PERIOD),
        st.integers(1, 6),
        st.lists(st.sampled_from(KINDS), max_size=3),
    ),
)


@given(SCHEDULES)
@settings(max_examples=200, deadline=None)
def test_segments_spell_out_the_schedule(layers: list[LayerSpec]) -> None:
    for scan in (True, False):
        plans = plan_segments(layers, scan)
        assert [layer for plan in plans for layer in plan.pattern * plan.repeats] == layers
        ends = [0, *(plan.first + plan.layers for plan in plans)]
        assert ends == [*(plan.first for plan in plans), len(layers)]
        assert all(len(plan.pattern) <= MAX_PERIOD for plan in plans)
        if not scan:
            assert all(plan.layers == 1 for plan in plans)


@given(pattern=st.lists(st.sampled_from(KINDS), min_size=1, max_size=MAX_PERIOD), repeats=st.integers(2, 9))
@settings(deadline=None)
def test_a_schedule_that_repeats_is_one_segment(pattern: list[LayerSpec], repeats: int) -> None:
    (plan,) = plan_segments(pattern * repeats, scan=True)
    assert plan.repeats >= repeats
    assert plan.layers == len(pattern) * repeats


def test_examples() -> None:
    assert shape(plan_segments(schedule("klm"), scan=True)) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    assert shape(plan_segments(schedule("kkkk"), scan=True)) == [(0, 1, 4)]
    assert shape(plan_segments(schedule("mkklkkl"), scan=True)) == [(0, 1, 1), (1, 3, 2)]
    assert shape(plan_segments(schedule("kklkk"), scan=True)) == [(0, 1, 2), (2, 1, 1), (3, 1, 2)]
    assert plan_segments((), scan=True) == ()


def test_kimi_linear_as_published() -> None:
    plans = plan_segments(published("kimi-linear-48b-a3b").layers, scan=True)
    assert shape(plans) == [(0, 1, 1), (1, 4, 6), (25, 1, 1), (26, 1, 1)]
    kinds = [layer.mixer.kind for layer in plans[1].pattern]
    assert kinds == ["kimi_delta", "kimi_delta", "latent_attention", "kimi_delta"]
    assert plans[0].pattern[0].ffn.kind == "dense"


def test_qwen3_next_as_published() -> None:
    assert shape(plan_segments(published("qwen3-next-80b-a3b").layers, scan=True)) == [(0, 4, 12)]


def test_qwen3_as_published() -> None:
    assert shape(plan_segments(published("qwen3-8b").layers, scan=True)) == [(0, 1, 36)]
