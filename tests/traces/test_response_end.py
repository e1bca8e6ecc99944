"""What a checkpoint at the response's end saves: the response, at every call that goes on from one before it."""

import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from jaxhybrid.cache.retention import Retention
from jaxhybrid.chat import ChatTokenizer
from jaxhybrid.traces.files import find_files
from jaxhybrid.traces.recognise import read_file
from jaxhybrid.traces.simulate import Policy, simulate
from jaxhybrid.traces.tokenise import tokenise
from jaxhybrid.traces.trajectory import TokenCall, TokenTrajectory, Trajectory

SHARED = Path(os.environ.get("JAXHYBRID_SHARED", Path(__file__).resolve().parents[2] / "../shared")) / "traces"
DEMO = Path(str(resources.files("jaxhybrid") / "demo"))
POLICIES = (
    Policy("kept", Retention()),
    Policy("prompts only", Retention(response_end=False, turn_start=False, message_start=False, junctions=False)),
)
BOUNDARY = 8
"""Tokens that a template may encode anew where one turn ends and the next begins."""


def tokenised(*paths: Path) -> Iterator[TokenTrajectory]:
    tokenizer = ChatTokenizer.from_folder(DEMO)
    for file in find_files(paths):
        for item in read_file(file):
            assert isinstance(item, Trajectory), item
            yield tokenise(item, tokenizer)


def shared_tokens(call: TokenCall, parent: TokenCall) -> tuple[int, int]:
    """Tokens that a call has in common with its parent's prompt and response, and how many those are."""
    context = np.concatenate([parent.prompt_ids, parent.response_ids])
    size = min(context.size, call.prompt_ids.size)
    same = np.append(context[:size] == call.prompt_ids[:size], False)
    return int(same.argmin()), context.size


def check(run: TokenTrajectory) -> tuple[int, int]:
    """Holds a run against the claim; returns how many calls go on from their parent, and how many could not."""
    kept, prompts = (result.gap_by_call for result in simulate([run], POLICIES, shared=False))
    goes_on = could_not = 0
    for number, call in enumerate(run.calls):
        if call.parent is None:
            continue
        parent = run.calls[call.parent]
        shared, context = shared_tokens(call, parent)
        if shared < parent.turn_start:  # the caller edited the context, or the template stripped an earlier response
            could_not += 1
            continue
        assert kept[number] <= BOUNDARY, (run.id, number)
        if shared == context and sum(each.parent == call.parent for each in run.calls) == 1:
            assert prompts[number] == parent.response_ids.size, (run.id, number)
            goes_on += parent.response_ids.size > 0  # a few of the dialogues have empty turns
    return goes_on, could_not


def test_the_projects_own_traces():
    goes_on, could_not = np.array([check(run) for run in tokenised(DEMO / "traces")]).sum(axis=0)
    assert goes_on >= 60
    # Each run forks sub-agents and re-asks after its reasoning was stripped, and one edits its context.
    assert 5 <= could_not < goes_on / 2


@pytest.mark.shared
@pytest.mark.parametrize(
    ("path", "calls"),
    [
        ("tau-bench/MockRetailDomainEnv-few_shot.jsonl", 400),
        ("mini-swe-agent/django__django-14752.json", 30),
        pytest.param("mini-swe-agent", 570, marks=pytest.mark.slow),
        pytest.param("tau-bench", 1400, marks=pytest.mark.slow),
    ],
)
def test_recorded_runs_that_only_append(path: str, calls: int):
    if not (SHARED / path).exists():
        pytest.skip(f"no recorded traces at {SHARED / path}")
    goes_on, could_not = np.array([check(run) for run in tokenised(SHARED / path)]).sum(axis=0)
    assert could_not == 0
    assert goes_on >= calls
