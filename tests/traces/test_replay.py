"""Recorded calls through a real engine: in which order, and with what is reused."""

import dataclasses
from pathlib import Path

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


def test_branches_run_side_by_side_each_in_its_order(
    tiny_model: jh.Model, log: RunLog, monkeypatch: pytest.MonkeyPatch
):
    answer = [*range(2, 61), 2, 3, 4]  # two chunks: no call is over in one dispatch
    plan = [("main", None), ("one", 0), ("two", 0), ("one", 1), ("two", 2), ("main", 0)]
    calls = tuple(
        call([*SYSTEM, 7, number], answer, parent=parent, branch=branch) for number, (branch, parent) in enumerate(plan)
    )
    engine = jh.Engine(tiny_model, dataclasses.replace(CONFIG, max_sequences=3, max_checkpoints=22))
    events: list[tuple[str, int]] = []
    submit = engine.submit

    def noted(tokens, *rest, **options):
        events.append(("begin", int(tokens[-1])))
        return submit(tokens, *rest, **options)

    monkeypatch.setattr(engine, "submit", noted)
    replay = Replay(
        engine, log, ReplayOptions(mode="score"), on_call=lambda record: events.append(("end", record.call))
    )  # fmt: skip
    replay.run(iter([TokenTrajectory("run", "run.json:1", calls)]))
    when = {event: at for at, event in enumerate(events)}
    assert len(when) == 12
    assert [number for kind, number in events if kind == "begin"] == list(range(6))
    for number, (branch, parent) in enumerate(plan):
        earlier = [n for n in range(number) if plan[n][0] == branch]
        for before in {parent, *earlier} - {None}:
            assert when["end", before] < when["begin", number]
    assert when["begin", 2] < when["end", 1] < when["end", 2]  # the sub-agents overlap
    assert when["begin", 5] < when["end", 4]  # and the main branch goes on beside them


def growing(*responses: int) -> TokenTrajectory:
    """Each call's prompt is the one before it, its response, and a tool result of five tokens."""
    rng = np.random.default_rng(8)
    prompt, calls = list(SYSTEM), []
    for number, size in enumerate(responses):
        answer = rng.integers(2, 61, size).tolist()
        calls.append(call(prompt, answer, parent=number - 1 if number else None))
        prompt = [*prompt, *answer, *rng.integers(2, 61, 5).tolist()]
    return TokenTrajectory("growing", "growing.json:1", tuple(calls))


@pytest.mark.parametrize(("response_end", "gaps"), [(True, [0, 0, 0, 0]), (False, [0, 17, 30, 9])])
def test_without_a_checkpoint_at_its_end_a_response_is_computed_again(
    tiny_model: jh.Model, log: RunLog, response_end: bool, gaps: list[int]
):
    retention = jh.Retention(response_end=response_end)
    engine = jh.Engine(tiny_model, dataclasses.replace(CONFIG, retention=retention))
    Replay(engine, log, ReplayOptions(mode="score")).run(iter([growing(17, 30, 9, 4)]))
    assert [record.gap for record in log.calls] == gaps
    assert {record.limited_by for record in log.calls[1:]} == {"none" if response_end else "recurrent"}


@pytest.mark.parametrize("splice", [True, False])
def test_retokenised_responses_are_put_back_all_along_the_line(chat_folder: Path, log: RunLog, splice: bool):
    model = jh.load_model(chat_folder)
    encode = model.tokenizer.encode

    def letters(text: str) -> list[int]:
        return [token for letter in text for token in encode(letter)]

    def ids(text: str) -> list[int]:
        return encode(text)

    opening, answers = ids("<|im_start|>user"), ["return the value", "open the file", "test"]
    prompts, made = [opening], []
    for answer in answers:
        made.append(letters(answer))
        assert len(ids(answer)) < len(made[-1])
        prompts.append([*prompts[-1], *ids(answer), *ids("<|im_end|>")])
    calls = tuple(call(prompts[n], made[n], parent=n - 1 if n else None, branch="main") for n in range(3))
    fork = call(prompts[2] + ids("fix"), [5], parent=1, branch="sub", message_start=len(prompts[2]))
    engine = jh.Engine(model, CONFIG)
    replay = Replay(engine, log, ReplayOptions(mode="score", splice=splice))
    replay.run(iter([TokenTrajectory("run", "run.json:1", (*calls, fork))]))
    assert replay.errors == []
    contexts = [record.context_tokens for record in log.calls]
    resumed = [record.resumed for record in log.calls]
    if splice:
        assert resumed[1:3] == contexts[:2]
        assert resumed[3] == contexts[1] + len(ids("<|im_end|>"))  # what the third call's prompt had in common
        assert [record.limited_by for record in log.calls] == ["cold", "none", "none", "none"]
    else:
        assert [record.limited_by for record in log.calls[1:3]] == ["template", "template"]
        assert [record.prompt_tokens for record in log.calls] == [each.prompt_ids.size for each in (*calls, fork)]


def test_prefill_without_reuse_is_measured_for_the_longest_prompt_that_tokens_last_for(
    tiny_model: jh.Model, log: RunLog, monkeypatch: pytest.MonkeyPatch
):
    replay = Replay(jh.Engine(tiny_model, CONFIG), log, ReplayOptions(mode="score"))
    run = growing(17, 30, 9, 4)
    replay.run(iter([run]))
    sizes = [each.prompt_ids.size for each in run.calls]
    monkeypatch.setattr("jaxhybrid.traces.replay.COLD_TOKENS", sizes[3] + sizes[0])
    replay.measure_cold()
    assert [sample.context_tokens for sample in log.cold] == [sizes[0], sizes[3]]
    assert all(sample.cold_ttft_s > 0 and sample.warm_ttft_s > 0 for sample in log.cold)
    assert len(log.calls) == 4
