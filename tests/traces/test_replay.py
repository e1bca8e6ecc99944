"""Recorded calls through a real engine: in which order, and with what is reused."""

import numpy as np
import pytest

import jaxhybrid as jh
from jaxhybrid.traces.record import RunHeader, RunLog
from jaxhybrid.traces.replay import Replay, ReplayOptions
from jaxhybrid.traces.simulate import Policy, simulate
from jaxhybrid.traces.trajectory import TokenCall, TokenTrajectory

CONFIG = jh.EngineConfig(
    max_sequences=1, max_tokens=1024, max_context=256, page_size=8, max_checkpoints=24, prefill_chunks=(32,),
    retention=jh.Retention(),
)  # fmt: skip
SYSTEM = np.random.default_rng(3).integers(2, 61, 40).tolist()


def call(prompt, response, *, message_start=None, parent=None, branch="main") -> TokenCall:
    ids, answer = np.array(prompt, np.int32), np.array(response, np.int32)
    return TokenCall(ids, len(prompt), answer, branch, parent, None, message_start)


def run_of(name: str, task: list[int]) -> TokenTrajectory:
    """A run of two calls whose second forks a sub-agent with a task of its own."""
    first = [*SYSTEM, *task]
    calls = (
        call(first, [5, 6, 7], message_start=40),
        call([*first, 5, 6, 7, 8, 8, task[-1]], [9, 9], parent=0, branch="one", message_start=len(first) + 3),
        call([*first, 5, 6, 7, 8, 9, task[-1]], [9, 4], parent=0, branch="two", message_start=len(first) + 3),
        call([*first, 5, 6, 7, 3], [11], parent=0),
    )
    return TokenTrajectory(name, f"{name}.json:1", calls)


RUNS = [run_of("a", [12, 12, 13, 14]), run_of("b", [12, 12, 15, 16, 17]), run_of("c", [18, 19])]


@pytest.fixture
def log(tmp_path):
    with RunLog(tmp_path / "run.jsonl", RunHeader(model="tiny", mode="score", traces=())) as log:
        yield log


def test_siblings_resume_at_their_message_and_one_row_serves_every_trajectory(tiny_model: jh.Model, log: RunLog):
    engine = jh.Engine(tiny_model, CONFIG)
    Replay(engine, log, ReplayOptions(mode="score", splice=False)).run(iter(RUNS))
    assert [(record.trajectory, record.call) for record in log.calls] == [(run.id, n) for run in RUNS for n in range(4)]
    second, third = (record for record in log.calls[4:] if record.call == 0)
    assert (second.matched, second.resumed, second.gap) == (42, 40, 2)
    assert (third.matched, third.resumed, third.gap) == (40, 40, 0)
    assert engine.stats().events.checkpoints["message_start"] == 1  # forks start where the response ended

    (studied,) = simulate(RUNS, [Policy("the engine's", CONFIG.retention)])
    assert sum(record.gap for record in log.calls) == studied.gap_tokens > 0
