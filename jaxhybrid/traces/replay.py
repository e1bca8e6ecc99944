"""Replays recorded calls through an engine: trajectories interleaved, each call once its branch allows it."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Int32

from jaxhybrid.chat import Remembered, splice_ids
from jaxhybrid.engine.engine import Engine
from jaxhybrid.engine.job import Job
from jaxhybrid.engine.lineage import common_prefix
from jaxhybrid.engine.sampling import Sampling
from jaxhybrid.engine.stats import EngineStats
from jaxhybrid.errors import JaxHybridError, TraceError
from jaxhybrid.traces.record import CallRecord, ColdSample, MemorySample, RunLog
from jaxhybrid.traces.trajectory import TokenCall, TokenTrajectory

Mode = Literal["forced", "score", "generate"]
TENANT = "replay"
SAMPLE_EVERY_S = 0.25
COLD_SAMPLES = 8
COLD_TOKENS = 48_000  # prompt tokens spent, at most, on measuring what a prefill without reuse takes


@dataclass(frozen=True)
class ReplayOptions:
    """How calls are replayed.

    mode: `forced` feeds the recorded response token by token through the decode loop, `score` in chunks, `generate`
    lets the model answer, up to the recorded length or `max_generated` tokens.
    splice: where a prompt spells the response before it in other tokens but the same text, put the response's own back.
    """

    mode: Mode = "forced"
    splice: bool = True
    max_generated: int = 256


@dataclass(eq=False)
class _Walk:
    """One trajectory under way. `ready` calls wait for a row; a call waits for its parent and its branch."""

    trajectory: TokenTrajectory
    finished: set[int]
    begun: set[int] = field(default_factory=set)

    def ready(self) -> Iterator[int]:
        """Calls that may begin, in order: their parent and all earlier ones of their branch are finished."""
        open_branches: set[str] = set()
        for number, call in enumerate(self.trajectory.calls):
            if number in self.finished:
                continue
            if number in self.begun:
                open_branches.add(call.branch)
                continue
            if call.branch in open_branches or call.parent not in (None, *self.finished):
                return
            yield number
            open_branches.add(call.branch)

    @property
    def over(self) -> bool:
        return len(self.finished) == len(self.trajectory.calls)


@dataclass(frozen=True, eq=False)
class _Running:
    walk: _Walk
    number: int
    prompt: Int32[np.ndarray, " n"]
    started_s: float


class Replay:
    """One run of trajectories through an engine, recorded call by call in `log`.

    `stop` is asked between dispatches; once it says yes the run ends, with what is done on record.
    """

    def __init__(
        self,
        engine: Engine,
        log: RunLog,
        options: ReplayOptions,
        on_call: Callable[[CallRecord], None] = lambda record: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.errors: list[str] = []
        self._engine, self._log, self._options = engine, log, options
        self._on_call, self._stop = on_call, stop
        self._clock_offset = log.elapsed_s - time.perf_counter()
        self._running: dict[Job, _Running] = {}
        self._walks: deque[_Walk] = deque()
        self._prompts: list[tuple[Int32[np.ndarray, " n"], float]] = []
        self._sampled_s = -SAMPLE_EVERY_S

    @property
    def elapsed_s(self) -> float:
        """Seconds into the run, those of the run that it resumes included."""
        return time.perf_counter() + self._clock_offset

    def run(self, trajectories: Iterable[TokenTrajectory | TraceError]) -> None:
        """Replays all, as many at a time as the engine has rows."""
        source = iter(trajectories)
        done = self._log.done
        more = True
        while not self._stop():
            while more and len(self._walks) < self._engine.config.max_sequences:
                more = self._open_next(source, done)
            self._begin_calls()
            if not self._running and not self._walks:
                return
            for job in self._engine.step():
                self._finish(job)
        for job in list(self._running):
            self._engine.cancel(job)

    def measure_cold(self) -> None:
        """What some of the prompts take without any reuse, beside what they took; spread over their lengths."""
        prompts = sorted(self._prompts, key=lambda item: item[0].size)
        if not prompts:
            return
        picks = {round(i * (len(prompts) - 1) / (COLD_SAMPLES - 1)) for i in range(COLD_SAMPLES)}
        spent = 0
        for number in sorted(picks):
            prompt, warm_s = prompts[number]
            spent += prompt.size
            if spent > COLD_TOKENS or self._stop():
                return
            job = self._engine.submit(prompt, tenant=f"{TENANT} without reuse")
            while job.phase != "done":
                self._engine.step()
            if job.error is None:
                job.sequence.release()
                self._log.append(ColdSample(context_tokens=prompt.size, cold_ttft_s=job.prefill_s, warm_ttft_s=warm_s))
            self._engine.delete(tenant=f"{TENANT} without reuse")

    def _open_next(self, source: Iterator[TokenTrajectory | TraceError], done: frozenset[tuple[str, int]]) -> bool:
        item = next(source, None)
        if item is None:
            return False
        if isinstance(item, TraceError):
            self.errors.append(str(item))
            return True
        finished = {number for number in range(len(item.calls)) if (item.id, number) in done}
        walk = _Walk(item, finished, set(finished))
        if not walk.over:
            self._walks.append(walk)
        return True

    def _begin_calls(self) -> None:
        for walk in self._walks:
            for number in list(walk.ready()):
                self._begin(walk, number)
        self._walks = deque(walk for walk in self._walks if not walk.over)

    def _begin(self, walk: _Walk, number: int) -> None:
        call = walk.trajectory.calls[number]
        prompt, turn_start = self._prompt(walk.trajectory, call)
        walk.begun.add(number)
        response = call.response_ids
        sampling = Sampling(max_tokens=max(1, response.size)) if response.size else None
        choices: Mapping[str, object] = {"sampling": sampling, "forced": response if response.size else None}
        if self._options.mode == "score":
            choices = {"scored": response if response.size else None}
        elif self._options.mode == "generate":
            length = min(response.size or self._options.max_generated, self._options.max_generated)
            stops = self._engine.model.tokenizer.end_token_ids
            choices = {"sampling": Sampling(max_tokens=length, stop_token_ids=stops)}
        try:
            job = self._engine.submit(
                prompt, TENANT, walk.trajectory.id, call.branch, turn_start,
                call.message_start,  # holds for this prompt: a branch's first call is never spliced
                **choices,  # type: ignore[arg-type]
            )  # fmt: skip
        except JaxHybridError as error:
            self._fail(walk, number, error)
            return
        self._running[job] = _Running(walk, number, prompt, self.elapsed_s)

    def _prompt(self, trajectory: TokenTrajectory, call: TokenCall) -> tuple[Int32[np.ndarray, " n"], int]:
        """The call's prompt, with its parent's response in the tokens it was made of where that changes no text."""
        if not self._options.splice or call.parent is None:
            return call.prompt_ids, call.turn_start
        parent = trajectory.calls[call.parent]
        made = np.concatenate([parent.prompt_ids, parent.response_ids])
        history = call.prompt_ids[: call.turn_start]
        shared = common_prefix(history, made)
        if parent.branch != call.branch or not parent.prompt_ids.size <= shared < min(made.size, history.size):
            return call.prompt_ids, call.turn_start
        at = max(0, parent.prompt_ids.size - 8)  # whole texts need not be decoded to compare their ends
        remembered = Remembered(made[at : parent.prompt_ids.size].tolist(), parent.response_ids.tolist())
        spliced = splice_ids(history[at:].tolist(), remembered, self._engine.model.tokenizer.decode)
        joined = np.concatenate([history[:at], np.array(spliced, np.int32), call.prompt_ids[call.turn_start :]])
        return joined, at + len(spliced)

    def _finish(self, job: Job) -> None:
        running = self._running.pop(job, None)
        if running is None:
            return
        if job.error is not None:
            self._fail(running.walk, running.number, job.error)
            return
        record = self._record(job, running)
        job.sequence.release()
        running.walk.finished.add(running.number)
        self._prompts.append((running.prompt, job.prefill_s))
        self._log.append(record)
        self._on_call(record)
        self._sample_memory()

    def _record(self, job: Job, running: _Running) -> CallRecord:
        call, reuse = running.walk.trajectory.calls[running.number], job.sequence.reuse
        likelihoods = job.scores if self._options.mode == "score" else job.log_probs
        return CallRecord(
            trajectory=running.walk.trajectory.id,
            call=running.number,
            branch=call.branch,
            parent=call.parent,
            prompt_tokens=running.prompt.size,
            matched=reuse.matched,
            resumed=reuse.resumed,
            gap=reuse.gap,
            limited_by=reuse.limited_by,
            new_tokens=running.prompt.size - reuse.matched,
            generated=job.sequence.length - running.prompt.size,
            context_tokens=job.sequence.length,
            differing=reuse.differing,
            ttft_s=job.prefill_s,
            decode_s=job.decode_s,
            log_likelihood=float(np.sum(likelihoods)) if likelihoods else None,
            finish_reason=job.finish_reason or "length",
            started_s=running.started_s,
        )

    def _fail(self, walk: _Walk, number: int, error: JaxHybridError) -> None:
        """A call that can't be replayed is skipped; those after it go on."""
        walk.finished.add(number)
        self.errors.append(f"{walk.trajectory.source}: call {number} of {walk.trajectory.id}: {error}")

    def _sample_memory(self) -> None:
        now = self.elapsed_s
        if now - self._sampled_s >= SAMPLE_EVERY_S:
            self._sampled_s = now
            stats = self._engine.stats()
            self._log.append(
                MemorySample(
                    t_s=now, bytes_by_kind=dict(stats.live_bytes),
                    live_sequences=stats.live_sequences, checkpoints=stats.retained_checkpoints,
                )
            )  # fmt: skip


def flat_counters(stats: EngineStats) -> dict[str, int | float]:
    """An engine's counters as one flat table for the report."""
    counters: dict[str, int | float] = {
        name: getattr(stats, name)
        for name in (
            "compiled_programs", "recurrent_bytes_copied", "kv_bytes_copied", "state_moves",
            "retained_checkpoints", "live_sequences", "live_slots", "free_slots", "live_pages", "free_pages",
        )
    }  # fmt: skip
    for name in (
        "restores",
        "forks",
        "evictions",
        "preemptions",
        "refusals",
        "prefill_dispatches",
        "decode_dispatches",
    ):
        counters[name] = getattr(stats.events, name)
    counters |= {f"checkpoints_{kind}": count for kind, count in stats.events.checkpoints.items()}
    return counters | {f"kernel_fallbacks_{name}": count for name, count in stats.kernel_fallbacks.items()}
