from dataclasses import replace

import pytest

from jaxhybrid.cache.retention import Retention, boundaries, response_boundaries
from jaxhybrid.errors import ConfigError

EVERYTHING = Retention(every=16)
NOTHING = Retention(prompt_end=False, response_end=False, turn_start=False, message_start=False, junctions=False)


REQUEST = {"length": 50, "resumed": 10, "matched": 21, "left_known_path": True, "turn_start": 47}


def wanted(retention, **overrides):
    return boundaries(retention, **(REQUEST | overrides))


def test_all_kinds_in_order():
    assert wanted(EVERYTHING, message_start=37) == [
        (16, "every"),
        (21, "junction"),
        (32, "every"),
        (37, "message_start"),
        (47, "turn_start"),
        (48, "every"),
        (50, "prompt_end"),
    ]


@pytest.mark.parametrize(
    ("retention", "expected"),
    [
        ({}, []),
        ({"prompt_end": True}, [(50, "prompt_end")]),
        ({"turn_start": True}, [(47, "turn_start")]),
        ({"message_start": True}, [(37, "message_start")]),
        ({"junctions": True}, [(21, "junction")]),
        ({"every": 25}, [(25, "every"), (50, "every")]),
    ],
)
def test_each_kind_alone(retention, expected):
    assert wanted(replace(NOTHING, **retention), message_start=37) == expected


def test_the_grid_starts_after_the_resume_point():
    grid = replace(NOTHING, every=10)
    assert [n for n, _ in wanted(grid, resumed=10)] == [20, 30, 40, 50]
    assert [n for n, _ in wanted(grid, resumed=9)] == [10, 20, 30, 40, 50]


def test_a_junction_needs_a_path_that_goes_on_and_a_gap():
    assert wanted(Retention(), left_known_path=False) == [(47, "turn_start"), (50, "prompt_end")]
    assert wanted(Retention(), resumed=21) == [(47, "turn_start"), (50, "prompt_end")]


def test_boundaries_at_or_before_the_resume_point_are_left_out():
    assert wanted(EVERYTHING, resumed=48, matched=48) == [(50, "prompt_end")]
    assert wanted(EVERYTHING, resumed=50, matched=50) == []


def test_one_boundary_is_named_once():
    assert wanted(EVERYTHING, length=48, matched=48, left_known_path=False, turn_start=48, resumed=33) == [
        (48, "turn_start")
    ]
    assert wanted(Retention(), turn_start=None, matched=50) == [(50, "junction")]


def test_a_turn_start_beyond_the_prompt_is_not_a_boundary_of_it():
    assert wanted(Retention(), turn_start=51, left_known_path=False) == [(50, "prompt_end")]


def test_a_message_that_starts_before_the_resume_point_needs_no_checkpoint():
    assert wanted(Retention(), message_start=10, left_known_path=False) == [(47, "turn_start"), (50, "prompt_end")]
    assert wanted(Retention(), message_start=0, resumed=0, matched=0, left_known_path=False, turn_start=None) == [
        (50, "prompt_end")
    ]


def test_a_grid_needs_a_step():
    with pytest.raises(ConfigError, match="every must be at least 1 token or None, got 0"):
        Retention(every=0)


def test_a_response_is_kept_at_its_end_and_on_the_grid():
    assert response_boundaries(Retention(), prompt_length=50, length=73) == [(73, "response_end")]
    assert response_boundaries(EVERYTHING, prompt_length=48, length=80) == [(64, "every"), (80, "response_end")]
    assert response_boundaries(Retention(response_end=False, every=16), prompt_length=49, length=63) == []
    assert response_boundaries(NOTHING, prompt_length=50, length=73) == []


def test_an_empty_response_has_no_end_of_its_own():
    assert response_boundaries(EVERYTHING, prompt_length=48, length=48) == []
