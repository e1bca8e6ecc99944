"""Who runs next, for any order of arrivals, failures and preemptions."""

from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxhybrid.engine.job import Job
from jaxhybrid.engine.sampling import Sampling
from jaxhybrid.engine.scheduler import Scheduler, Turn


def job(fresh: bool = True, score: bool = False) -> Job:
    """A job as the scheduler sees one: it never looks at the sequence or the tokens."""
    return Job(cast(Any, None), np.zeros(1, np.int32), Sampling(), score=score, fresh=fresh)


def scheduler_of(*jobs: Job, max_sequences: int = 8, prefill_rows: int = 2) -> Scheduler:
    scheduler = Scheduler(max_sequences, prefill_rows)
    for each in jobs:
        scheduler.submit(each)
    return scheduler


def test_first_come_first_served_up_to_the_rows_there_are() -> None:
    jobs = [job() for _ in range(5)]
    scheduler = scheduler_of(*jobs, max_sequences=3)
    assert scheduler.admit() == jobs[:3]
    assert [each.phase for each in jobs] == ["prefill"] * 3 + ["waiting"] * 2
    assert scheduler.admit() == []
    scheduler.complete(jobs[1])
    assert jobs[1].phase == "done"
    assert scheduler.admit() == [jobs[3]]
    assert scheduler.running == (jobs[0], jobs[2], jobs[3])


def test_prefill_takes_at_most_its_rows_and_one_kind() -> None:
    jobs = [job(), job(score=True), job(), job()]
    scheduler = scheduler_of(*jobs)
    scheduler.admit()
    assert scheduler.schedule() == Turn("prefill", (jobs[0], jobs[2]))
    for each in (jobs[0], jobs[2], jobs[3]):
        scheduler.complete(each)
    assert scheduler.schedule() == Turn("score", (jobs[1],))


def test_prefill_and_decode_alternate_while_both_have_work() -> None:
    jobs = [job() for _ in range(4)]
    scheduler = scheduler_of(*jobs)
    scheduler.admit()
    jobs[0].phase = jobs[1].phase = "decode"
    turns = [scheduler.schedule() for _ in range(4)]
    assert turns == [Turn("prefill", tuple(jobs[2:])), Turn("decode", tuple(jobs[:2]))] * 2
    jobs[2].phase = jobs[3].phase = "decode"
    assert [scheduler.schedule() for _ in range(2)] == [Turn("decode", tuple(jobs))] * 2


def test_nothing_to_do_is_no_turn() -> None:
    scheduler = scheduler_of()
    assert scheduler.schedule() is None
    assert scheduler.idle


def test_a_preempted_job_is_the_first_to_come_back() -> None:
    jobs = [job() for _ in range(4)]
    scheduler = scheduler_of(*jobs, max_sequences=3)
    scheduler.admit()
    jobs[2].phase = "decode"
    scheduler.preempt(jobs[2])
    assert jobs[2].phase == "waiting"
    assert scheduler.admit() == [jobs[2]]
    assert jobs[2].phase == "prefill"


def test_the_victim_is_the_last_admitted_and_never_one_that_a_caller_holds() -> None:
    jobs = [job(), job(), job(fresh=False), job(), job(fresh=False)]
    scheduler = scheduler_of(*jobs)
    scheduler.admit()
    assert scheduler.victim(spared=[]) is jobs[3]
    assert scheduler.victim(spared=[jobs[3]]) is jobs[1]
    assert scheduler.victim(spared=[jobs[0], jobs[1], jobs[3]]) is None


def test_a_waiting_job_can_be_taken_out() -> None:
    jobs = [job(), job()]
    scheduler = scheduler_of(*jobs, max_sequences=1)
    scheduler.admit()
    scheduler.complete(jobs[1])
    scheduler.complete(jobs[0])
    assert scheduler.idle
    assert [each.phase for each in jobs] == ["done", "done"]


ARRIVALS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3), st.integers(0, 3), st.booleans()), max_size=8)


@given(
    arrivals=ARRIVALS,
    gives_way=st.sets(st.integers(0, 15), max_size=5),
    max_sequences=st.integers(1, 4),
    prefill_rows=st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_every_job_is_completed(
    arrivals: list[tuple[int, int, int, bool]], gives_way: set[int], max_sequences: int, prefill_rows: int
) -> None:
    """Jobs arrive at a step, need some prefill and some decode turns, and give way at some steps."""
    scheduler = Scheduler(max_sequences, prefill_rows)
    left: dict[int, list[int]] = {}
    jobs: list[Job] = []
    admitted: list[Job] = []
    last: tuple[str, set[str]] | None = None
    for at in range(80):
        for when, prefills, decodes, fresh in arrivals:
            if when == at:
                jobs.append(job(fresh=fresh))
                left[id(jobs[-1])] = [prefills, decodes]
                scheduler.submit(jobs[-1])
        admitted += [new for new in scheduler.admit() if new not in admitted]
        running = scheduler.running
        assert len(running) <= max_sequences
        assert len(running) == max_sequences or not any(each.phase == "waiting" for each in jobs)
        phases = {each.phase for each in running}
        turn = scheduler.schedule()
        assert (turn is None) == (not phases)
        if turn is None:
            last = None
            continue
        if phases == {"prefill", "decode"} and last is not None and last[1] == phases:
            assert turn.kind != last[0]
        last = (turn.kind, phases)
        assert len(turn.jobs) <= (max_sequences if turn.kind == "decode" else prefill_rows)
        _work(scheduler, turn, left)
        victim = scheduler.victim(spared=turn.jobs)
        assert victim is None or (victim.fresh and victim in scheduler.running and victim not in turn.jobs)
        if victim is not None and at in gives_way:
            scheduler.preempt(victim)
            first, *others = scheduler.admit()
            assert first is victim
            admitted += others
    assert scheduler.idle
    assert [each.phase for each in jobs] == ["done"] * len(arrivals)
    assert admitted == jobs


def _work(scheduler: Scheduler, turn: Turn, left: dict[int, list[int]]) -> None:
    """One dispatch of every job of a turn; a preempted job's prompt counts as seen when it comes back."""
    for each in turn.jobs:
        assert each.phase == turn.kind
        counts = left[id(each)]
        stage = 1 if turn.kind == "decode" else 0
        counts[stage] = max(0, counts[stage] - 1)
        if not any(counts):
            scheduler.complete(each)
        elif not counts[0]:
            each.phase = "decode"
