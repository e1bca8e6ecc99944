"""Where a call leaves the ones before it, and whose doing that was."""

import numpy as np
import pytest

from jaxhybrid.engine.lineage import Divergence, Lineage

# Two rounds of a conversation: user 1-9, first response 10-19 (its turn opens with 10), tool 20-25, second response.
FIRST = np.arange(1, 20)
SECOND = np.arange(1, 32)


@pytest.fixture
def lineage() -> Lineage:
    lineage = Lineage()
    lineage.add("t", "run", "main", FIRST.astype(np.int32), turn_start=9)
    lineage.add("t", "run", "main", SECOND.astype(np.int32), turn_start=25)
    return lineage


def prompt(*parts: object) -> np.ndarray:
    return np.concatenate([np.atleast_1d(part) for part in parts]).astype(np.int32)


def diverges(lineage: Lineage, tokens: np.ndarray, branch: str = "main") -> Divergence | None:
    return lineage.divergence("t", "run", branch, tokens)


def test_a_prompt_that_extends_or_repeats_does_not_diverge(lineage: Lineage):
    assert diverges(lineage, prompt(SECOND, 40, 41)) is None
    assert diverges(lineage, prompt(SECOND)) is None
    assert diverges(lineage, prompt(FIRST[:12])) is None
    assert lineage.divergence("t", "another", "main", prompt(60)) is None


def test_reasoning_left_out_of_any_earlier_response_is_the_templates_doing(lineage: Lineage):
    # The opening of the first response stays; what it reasoned is gone, in this and every later turn.
    stripped = prompt(SECOND[:11], SECOND[15:25], SECOND[25:26], SECOND[29:], 50)
    assert diverges(lineage, stripped) == Divergence("template", 11, 12, 16)
    assert diverges(lineage, prompt(SECOND[:28], 50)) == Divergence("template", 28, 29, 50)


def test_a_changed_message_is_an_edit(lineage: Lineage):
    assert diverges(lineage, prompt(SECOND[:21], 50, SECOND[22:])) == Divergence("context_edit", 21, 22, 50)
    assert diverges(lineage, prompt(SECOND[:4], 50)) == Divergence("context_edit", 4, 5, 50)


def test_what_follows_a_rewritten_response_is_known_again(lineage: Lineage):
    shorter = prompt(SECOND[:11], SECOND[15:], 50, 51, 52)  # 30 tokens, its own response from 27
    lineage.add("t", "run", "main", shorter, turn_start=27)
    assert diverges(lineage, prompt(shorter[:28], 60)) == Divergence("template", 28, 51, 60)
    assert diverges(lineage, prompt(shorter[:24], 60)) == Divergence("context_edit", 24, int(shorter[24]), 60)


def test_a_fork_differs_where_it_leaves_but_shows_what_was_stripped_before(lineage: Lineage):
    assert diverges(lineage, prompt(SECOND[:25], 50), "helper") is None
    assert diverges(lineage, prompt(SECOND[:28], 50), "helper") is None
    assert diverges(lineage, prompt(SECOND[:21], 50), "helper") is None
    assert diverges(lineage, prompt(SECOND[:11], 50), "helper") == Divergence("template", 11, 12, 50)
    lineage.add("t", "run", "helper", prompt(SECOND[:25], 50, 51, 52), turn_start=26)
    assert diverges(lineage, prompt(SECOND[:25], 60), "helper") == Divergence("context_edit", 25, 50, 60)
    # The fork knows the responses of the branch it came from.
    assert diverges(lineage, prompt(SECOND[:11], 60), "helper") == Divergence("template", 11, 12, 60)


def test_a_response_made_in_a_call_of_its_own_is_one_turn_with_its_prompt():
    lineage = Lineage()
    lineage.add("t", "run", "main", FIRST[:12].astype(np.int32), turn_start=9)
    lineage.add("t", "run", "main", FIRST.astype(np.int32), turn_start=12)
    assert diverges(lineage, prompt(FIRST[:15], 50)) == Divergence("template", 15, 16, 50)
    assert diverges(lineage, prompt(FIRST[:9], 50), "helper") is None


def test_forgetting(lineage: Lineage):
    lineage.forget(None, "run")
    assert diverges(lineage, prompt(60)) is None
