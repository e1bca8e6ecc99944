"""Which earlier call a prompt is held against, and what is forgotten of them."""

import numpy as np
import pytest

from jaxhybrid.engine.lineage import REMEMBERED_CALLS, Divergence, Lineage, common_prefix


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.fixture
def lineage() -> Lineage:
    """One call: a prompt of five tokens whose last two are the generation prompt, and a response of three."""
    lineage = Lineage()
    lineage.add("t", "run", "main", ids(1, 2, 3, 8, 9, 20, 21, 22), turn_start=3)
    return lineage


def test_the_call_with_most_in_common_is_the_one_to_differ_from(lineage: Lineage) -> None:
    lineage.add("t", "run", "main", ids(1, 2, 6, 6, 6), turn_start=4)
    assert lineage.divergence("t", "run", "main", ids(1, 2, 3, 8, 0)) == Divergence("template", 4, 9, 0)
    assert lineage.divergence("t", "run", "main", ids(1, 2, 6, 0)) == Divergence("context_edit", 3, 6, 0)
    # In common with both alike: the later one is what the caller last saw.
    assert lineage.divergence("t", "run", "main", ids(1, 2, 0)) == Divergence("context_edit", 2, 6, 0)


def test_only_the_last_calls_are_remembered(lineage: Lineage) -> None:
    for number in range(REMEMBERED_CALLS):
        lineage.add("t", "run", "main", ids(1, 30 + number, 5), turn_start=1)
    found = lineage.divergence("t", "run", "main", ids(1, 2, 3, 8, 0))
    assert found == Divergence("template", 1, 30 + REMEMBERED_CALLS - 1, 2)


@pytest.mark.parametrize(
    ("tenant", "trajectory", "left"),
    [
        ("t", "run", {("t", "walk"), ("u", "run")}),
        ("t", None, {("u", "run")}),
        (None, "run", {("t", "walk")}),
        ("v", None, {("t", "run"), ("t", "walk"), ("u", "run")}),
    ],
)
def test_forgetting(tenant: str | None, trajectory: str | None, left: set) -> None:
    lineage = Lineage()
    owners = [("t", "run"), ("t", "walk"), ("u", "run")]
    for owner in owners:
        lineage.add(*owner, "main", ids(1, 2), turn_start=1)
    lineage.forget(tenant, trajectory)
    assert {owner for owner in owners if lineage.divergence(*owner, "main", ids(9))} == left


def test_common_prefix() -> None:
    assert common_prefix(ids(1, 2, 3), ids(1, 2, 4, 5)) == 2
    assert common_prefix(ids(1, 2), ids(1, 2, 4)) == 2
    assert common_prefix(ids(), ids(1)) == 0
    assert common_prefix(ids(2), ids(1)) == 0
