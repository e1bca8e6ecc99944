"""Replays recorded calls through an engine: trajectories interleaved, each call once its branch allows it."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from jaxtyping import Int32

from jaxhybrid.chat import Remembered, splice_ids
from jaxhybrid.engine.engine import Engine
from jaxhybrid.engine.job import Job
from jaxhybrid.engine.lineage import Lineage, common_prefix
from jaxhybrid.engine.sampling import Sampling
from jaxhybrid.engine.sequence import Reuse
from jaxhybrid.errors import JaxHybridError, TokenError, TraceError
from jaxhybrid.traces.counters import flat_counters
from jaxhybrid.traces.record import CallRecord, ColdSample, CounterSample, MemorySample, RunLog
from jaxhybrid.traces.trajectory import TokenCall, TokenTrajectory

Mode = Literal["forced", "score", "generate"]
TENANT = "replay"
SAMPLE_EVERY_S = 0.25
COLD_SAMPLES = 8
LENGTHS_PER_OCTAVE = 4
COLD_TOKENS = 48_000  # prompt tokens spent, at most, on measuring what a prefill without reuse takes
OVERLAP = 8  # tokens before a difference that its characters may have begun in

_Timed = tuple[Int32[np.ndarray, " n"], float]
"""A prompt, and the seconds that its prefill took."""


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
    """One trajectory under way.

    Calls begin in the order of recording, each once its parent and all earlier calls of its branch are finished: that
    is what puts branches side by side, and keeps a sub-agent from starting before the call that sent it off.
    `contexts` holds the tokens, prompt and response, of finished calls that later ones continue.
    """

    trajectory: TokenTrajectory
    finished: set[int]
    begun: set[int] = field(default_factory=set)
    contexts: dict[int, Int32[np.ndarray, " n"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        calls = self.trajectory.calls
        self._children = Counter(call.parent for n, call in enumerate(calls) if n not in self.finished)

    def ready(self) -> Iterator[int]:
        """Calls that may begin."""
        open_branches: set[str] = set()
        for number, call in enumerate(self.trajectory.calls):
            if number in self.finished:
                continue
            if number in self.begun:
                open_branches.add(call.branch)
                continue
            if call.branch in open_branches or not (call.parent is None or call.parent in self.finished):
                return
            yield number
            open_branches.add(call.branch)

    def parent_context(self, call: TokenCall) -> Int32[np.ndarray, " n"] | None:
        """What the call's parent ended with; kept until its last child asks. As recorded if it was not replayed."""
        if call.parent is None:
            return None
        parent = self.trajectory.calls[call.parent]
        self._children[call.parent] -= 1
        context = self.contexts.get(call.parent)
        if not self._children[call.parent]:
            self.contexts.pop(call.parent, None)
        return np.concatenate([parent.prompt_ids, parent.response_ids]) if context is None else context

    def finish(self, number: int, context: Int32[np.ndarray, " n"] | None = None) -> None:
        """Marks a call as finished; `context`: its prompt and response, if it was replayed."""
        self.finished.add(number)
        if context is not None and self._children[number]:
            self.contexts[number] = context

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

    `on_call` is told of every call that is done, `on_skip` of every one that failed. `stop` is asked between
    dispatches; once it says yes the run ends, with what is done on record.
    """

    def __init__(
        self,
        engine: Engine,
        log: RunLog,
        options: ReplayOptions,
        on_call: Callable[[CallRecord], None] = lambda record: None,
        on_skip: Callable[[], None] = lambda: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.errors: list[str] = []
        self._engine, self._log, self._options = engine, log, options
        self._on_call, self._on_skip, self._stop = on_call, on_skip, stop
        self._clock_offset = log.elapsed_s - time.perf_counter()
        self._running: dict[Job, _Running] = {}
        self._recorded = Lineage()
        self._walks: deque[_Walk] = deque()
        self._prompts: dict[int, _Timed] = {}
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
            while more and len(self._walks) < self._engine.config.max_sequences and not self._stop():
                more = self._open_next(source, done)
            self._begin_calls()
            if not (self._running or self._walks or more):
                break
            for job in self._engine.step():
                self._finish(job)
        self._note_counters()
        for job in list(self._running):
            self._engine.cancel(job)

    def measure_cold(self) -> None:
        """What some of the prompts take without any reuse, beside what they took; spread over their lengths."""
        for prompt, warm_s in _cold_picks([*self._prompts.values()]):
            if self._stop():
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
        recorded = walk.trajectory.calls[number]
        call = self._spliced(recorded, walk.parent_context(recorded))
        walk.begun.add(number)
        try:
            job = self._engine.submit(
                call.prompt_ids, TENANT, walk.trajectory.id, call.branch, call.turn_start, call.message_start,
                **self._response(call),  # type: ignore[arg-type]
            )  # fmt: skip
        except JaxHybridError as error:
            self._fail(walk, number, error)
            return
        self._running[job] = _Running(walk, number, call.prompt_ids, self.elapsed_s)

    def _response(self, call: TokenCall) -> Mapping[str, object]:
        """What the engine is asked to do after the prompt."""
        response, limit = call.response_ids, self._options.max_generated
        if self._options.mode == "generate":
            stops = self._engine.model.tokenizer.end_token_ids
            return {"sampling": Sampling(max_tokens=min(response.size or limit, limit), stop_token_ids=stops)}
        if not response.size:
            return {}
        if self._options.mode == "score":
            return {"scored": response}
        return {"sampling": Sampling(max_tokens=response.size), "forced": response}

    def _spliced(self, call: TokenCall, context: Int32[np.ndarray, " n"] | None) -> TokenCall:
        """The call with its parent's context in its own tokens, where the prompt has the same text in others."""
        history = call.prompt_ids[: call.turn_start]
        shared = 0 if context is None else common_prefix(history, context)
        if not self._options.splice or context is None or shared in (context.size, history.size):
            return call
        at = max(0, shared - OVERLAP)  # texts that begin alike need not be decoded whole to compare their ends
        known = Remembered((), context[at:].tolist())
        try:
            spliced = splice_ids(history[at:].tolist(), known, self._engine.model.tokenizer.rendered_text)
        except TokenError:  # made up from block hashes, and not all of it in the vocabulary
            return call
        prompt = np.concatenate([history[:at], np.array(spliced, np.int32), call.prompt_ids[call.turn_start :]])
        longer, message_start = prompt.size - call.prompt_ids.size, call.message_start
        if message_start is not None and message_start > shared:
            message_start += longer
        return replace(
            call, prompt_ids=prompt, turn_start=call.turn_start + longer, message_start=message_start
        )  # fmt: skip

    def _finish(self, job: Job) -> None:
        running = self._running.pop(job, None)
        if running is None:
            return
        if job.error is not None:
            self._fail(running.walk, running.number, job.error)
            return
        record = self._record(job, running)
        running.walk.finish(running.number, job.sequence.tokens)
        job.sequence.release()
        # One prompt of about each length is enough to measure, and holds no more tokens than a few prompts have.
        self._prompts[round(LENGTHS_PER_OCTAVE * math.log2(running.prompt.size))] = running.prompt, job.prefill_s
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
            limited_by=self._limited_by(running, reuse),
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

    def _limited_by(self, running: _Running, reuse: Reuse) -> str:
        """The engine's answer; but in generate mode the engine takes a recorded response, where the model had answered
        something else, for a rewritten or edited one. So there the recorded calls say whether that is what it was.
        """
        if self._options.mode != "generate":
            return reuse.limited_by
        trajectory, call = running.walk.trajectory.id, running.walk.trajectory.calls[running.number]
        divergence = self._recorded.divergence(TENANT, trajectory, call.branch, call.prompt_ids)
        tokens = np.concatenate([call.prompt_ids, call.response_ids])
        self._recorded.add(TENANT, trajectory, call.branch, tokens, call.turn_start)
        if reuse.differing is None:
            return reuse.limited_by
        return "replaced" if divergence is None or divergence.position > reuse.differing[0] else divergence.kind

    def _fail(self, walk: _Walk, number: int, error: JaxHybridError) -> None:
        """A call that can't be replayed is skipped; those after it go on."""
        walk.finish(number)
        self._on_skip()
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
            self._note_counters()

    def _note_counters(self) -> None:
        self._log.append(CounterSample(process=self._log.process, values=flat_counters(self._engine.stats())))


def _cold_picks(prompts: list[_Timed]) -> list[_Timed]:
    """`COLD_SAMPLES` prompts, evenly spread in order of length, ascending; the longest first while tokens last."""
    prompts = sorted(prompts, key=lambda item: item[0].size)
    places = {round(i * (len(prompts) - 1) / (COLD_SAMPLES - 1)) for i in range(COLD_SAMPLES)} if prompts else set()
    chosen, left = [], COLD_TOKENS
    for place in sorted(places, reverse=True):
        if prompts[place][0].size <= left:
            left -= prompts[place][0].size
            chosen.append(prompts[place])
    return chosen[::-1]
