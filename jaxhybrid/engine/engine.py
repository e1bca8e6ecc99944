"""The engine: prefills, extends, generates, forks and resumes sequences over one state pool."""

import time
from collections.abc import Sequence as Several
from functools import partial

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxhybrid.cache.prefix_index import Checkpoint
from jaxhybrid.engine.config import EngineConfig
from jaxhybrid.engine.dispatch import address_of, chunk_plan
from jaxhybrid.engine.job import Job
from jaxhybrid.engine.media_memory import ChunkRow, Keys
from jaxhybrid.engine.memory import StateMemory
from jaxhybrid.engine.programs import Programs
from jaxhybrid.engine.sampling import Sampling, SamplingControls, SamplingMode
from jaxhybrid.engine.scheduler import Scheduler, Turn
from jaxhybrid.engine.sequence import Generation, Mark, Sequence
from jaxhybrid.engine.stats import EngineStats
from jaxhybrid.engine.stop_strings import kept_tokens
from jaxhybrid.errors import (
    BusyError,
    CancelledError,
    CapacityError,
    ConfigError,
    JaxHybridError,
    ReleasedError,
    TokenError,
)
from jaxhybrid.layers.step import MediaInputs
from jaxhybrid.media import Media, place
from jaxhybrid.model import Model, check_tokens
from jaxhybrid.state.batch import BatchAddress
from jaxhybrid.state.pool import Bundle, Reservation

TokenIds = Several[int] | Int[np.ndarray, " n"]
STOP_WIDTH = 8  # stop tokens a row has room for, before the program is compiled for more


class Engine:
    """Serves one model on one pool. Not thread-safe: one caller drives it."""

    def __init__(self, model: Model, config: EngineConfig | None = None) -> None:
        self.model = model
        self.config = config or EngineConfig()
        self._programs = Programs(model)
        self._memory = StateMemory(model, self.config, self._programs)
        self._scheduler = Scheduler(self.config.max_sequences, self.config.prefill_rows)

    # Sequences

    def prefill(
        self,
        token_ids: TokenIds,
        tenant: str = "default",
        trajectory: str | None = None,
        branch: str = "main",
        turn_start: int | None = None,
        message_start: int | None = None,
        media: Several[Media] = (),
    ) -> Sequence:
        """A new sequence of these tokens, computed from the longest complete prefix known to the tenant.

        `turn_start`: how many of them come before the generation prompt, if that is known; a checkpoint is kept there.
        `message_start`: likewise before the last message; worth giving on the first call of a run or sub-agent, for
        others that begin as it does. `media`: images and videos, in the order of their placeholders among the tokens
        (see `jaxhybrid.media`); a prefix is the same only if its images are.
        Raises TokenError for bad ids or too many, CapacityError if the pool can't hold them; the engine goes on.
        """
        prompt = self.submit(token_ids, tenant, trajectory, branch, turn_start, message_start, media=media)
        return self._finish(prompt).sequence

    def extend(self, sequence: Sequence, token_ids: TokenIds, media: Several[Media] = ()) -> Sequence:
        """Appends tokens without sampling, such as a tool's result. Errors as `prefill`; the sequence is as it was."""
        keys, frames = self._memory.media.keyed(self._checked(token_ids, sequence.length), media)
        sequence._frames |= frames
        self._finish(self._queue(Job(sequence, keys)))
        return sequence

    def score(self, sequence: Sequence, token_ids: TokenIds) -> Float[np.ndarray, " n"]:
        """Appends tokens as `extend` does and returns the log-probability of each given all before it."""
        self._must_have_tokens(sequence)
        scored = self._text(token_ids, sequence.length)
        job = self._finish(self._queue(Job(sequence, np.zeros(0, np.int32), scored=scored)))
        return np.array(job.scores, np.float32)

    def generate(
        self,
        sequences: Several[Sequence],
        sampling: Sampling | Several[Sampling],
        forced: Several[TokenIds] | None = None,
    ) -> list[Generation]:
        """Continues every sequence, together, and returns what each made, in order.

        `forced`: recorded responses, taken token by token through the decode loop instead of sampling. The first error
        (CapacityError, for one) is raised once all the others are done.
        """
        options = [sampling] * len(sequences) if isinstance(sampling, Sampling) else list(sampling)
        for name, given in (("sampling options", options), ("forced responses", forced)):
            if given is not None and len(given) != len(sequences):
                raise ConfigError(f"expected {len(sequences)} {name}, one for each sequence, got {len(given)}")
        if len({id(sequence) for sequence in sequences}) < len(sequences):
            raise BusyError("the same sequence was given twice; fork it to continue it in two ways")
        jobs = []
        for number, (sequence, option) in enumerate(zip(sequences, options, strict=True)):
            self._must_have_tokens(sequence)
            response = None if forced is None else self._text(forced[number], sequence.length)
            jobs.append(Job(sequence, np.zeros(0, np.int32), option, response))
        for job in jobs:  # all or none: one that is refused must not leave the others queued
            self._check(job)
        for job in jobs:
            self._scheduler.submit(job)
        while any(job.phase != "done" for job in jobs):
            self.step()
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [job.generation for job in jobs]

    def resume(self, mark: Mark, trajectory: str | None = None, branch: str = "main") -> Sequence:
        """A new sequence that goes on from a retained bundle. Raises ReleasedError if it was evicted or deleted."""
        sequence = self._memory.resume(self, mark._checkpoint, trajectory, branch)
        sequence._frames = dict(mark._frames)
        return sequence

    def delete(self, trajectory: str | None = None, tenant: str | None = None) -> int:
        """Forgets checkpoints and known paths of a trajectory or tenant, and releases its live sequences.

        Returns the number of checkpoints forgotten. Raises TokenError if neither is named.
        """
        if trajectory is None and tenant is None:
            raise TokenError("delete needs a trajectory or a tenant")
        for job in self._scheduler.jobs:
            if trajectory in (None, job.sequence.trajectory) and tenant in (None, job.sequence.tenant):
                self._fail(job, ReleasedError("deleted before it was done"))
        return self._memory.delete(trajectory, tenant)

    # Requests that share dispatches

    def submit(
        self,
        token_ids: TokenIds,
        tenant: str = "default",
        trajectory: str | None = None,
        branch: str = "main",
        turn_start: int | None = None,
        message_start: int | None = None,
        sampling: Sampling | None = None,
        forced: TokenIds | None = None,
        scored: TokenIds | None = None,
        media: Several[Media] = (),
    ) -> Job:
        """Queues a prompt, and a continuation if `sampling` is given; `step` works on it.

        `forced` is taken as the response, token by token; `scored` likewise but in chunks. The sequence belongs to the
        caller once the job is done without an error.
        """
        tokens = self._checked(token_ids, 0)
        for name, start in (("turn_start", turn_start), ("message_start", message_start)):
            if start is not None and not 0 <= start <= tokens.size:
                raise TokenError(f"{name} must be 0 to {tokens.size}, got {start}")
        response, targets = (None if ids is None else self._text(ids, tokens.size) for ids in (forced, scored))
        keys, frames = self._memory.media.keyed(tokens, media)
        sequence = self._memory.new_sequence(self, tenant, trajectory, branch)
        sequence._frames = frames
        job = Job(
            sequence, keys, sampling, response, targets,
            turn_start=turn_start, message_start=message_start, fresh=True,
        )  # fmt: skip
        return self._queue(job)

    def cancel(self, job: Job) -> None:
        """Takes a job out before it is done; a sequence made for it is released, another is as it was."""
        if job.phase != "done":
            self._fail(job, CancelledError(f"cancelled after {job.sequence.length} tokens"))

    def step(self) -> list[Job]:
        """One dispatch for the requests whose turn it is; returns those that are done or failed (see `Job.error`)."""
        done = self._open([job for job in self._scheduler.admit() if not job.fresh])
        turn = self._scheduler.schedule()
        if turn is None:
            return done
        if turn.kind == "decode":
            return done + self._run_decode(turn)
        # A prompt is looked up only now that its turn has come: what came before it in the queue is in the index.
        done += self._open([job for job in turn.jobs if not job.opened])
        left = tuple(job for job in turn.jobs if job.phase == "prefill" and job.pending.size)
        return done + (self._run_prefill(Turn(turn.kind, left)) if left else [])

    def _open(self, jobs: Several[Job]) -> list[Job]:
        for job in jobs:
            self._memory.open(job)
            job.opened = True
        return self._after_prompt([job for job in jobs if not job.pending.size])

    def warm_up(self, rows: Several[int] = (1,), modes: Several[Sampling] = (Sampling(),), score: bool = False) -> None:
        """Compiles the programs for these batch sizes and kinds of sampling, and for `score`, on padding only."""
        address = self._address([], [], [], 1)
        for chunk in self.config.prefill_chunks:
            tokens = np.zeros((1, chunk), np.int32)
            self._memory.run(partial(self._programs.prefill, tokens=tokens, address=address))
            if score:
                scored = partial(self._programs.score, tokens=tokens, address=address)
                self._memory.run_for([], scored)
        for count in rows:
            for option in modes:
                self._warm_up_decode(self.config.bucket(count), option)

    def _warm_up_decode(self, rows: int, option: Sampling) -> None:
        mode = SamplingMode.of([option])
        counts = np.zeros((2, rows, self.model.config.vocab_size), np.int32)
        decode = partial(
            self._programs.decode,
            address=self._address([], [], [], rows),
            mode=mode,
            budget=np.zeros(rows, np.int32),
            forced=np.full((rows, self.config.steps_per_dispatch), -1, np.int32),
            controls=SamplingControls.of([], rows, STOP_WIDTH),
            counts=(counts[0], counts[1]) if mode.penalised else None,
        )
        self._memory.run(lambda pool: decode(pool)[1])

    def stats(self) -> EngineStats:
        """Every counter, as of now."""
        return self._memory.stats(self._programs.count)

    # How a step runs

    def _queue(self, job: Job) -> Job:
        self._check(job)
        self._scheduler.submit(job)
        return job

    def _check(self, job: Job) -> None:
        """Raises if the job can't be queued; a sequence made for it is then released."""
        job.sequence.bundle  # noqa: B018  raises if it was released
        if self._scheduler.working_on(job.sequence):
            raise BusyError(f"{job.sequence} is being worked on; finish or cancel that first")
        response = job.wanted if job.scored is None else job.scored.size
        longest = job.sequence.length + job.pending.size + response
        if longest > self._memory.max_context:
            self._memory.events.refusals += 1
            if job.fresh:
                self._memory.release(job.sequence)
            raise TokenError(f"{longest} tokens with the response are more than max_context={self._memory.max_context}")

    def _finish(self, job: Job) -> Job:
        while job.phase != "done":
            self.step()
        if job.error is not None:
            raise job.error
        return job

    def _run_prefill(self, turn: Turn) -> list[Job]:
        first = turn.jobs[0]
        chunk = chunk_plan(self._until_boundary(first, first.pending.size), self.config.prefill_chunks)[0]
        wanted = [min(chunk, self._until_boundary(job, job.pending.size)) for job in turn.jobs]
        jobs, steps, failed = self._reserve(turn.jobs, wanted)
        if not jobs:
            return failed
        lengths = [step.tokens for step in steps]
        rows = self.config.bucket(len(jobs)) if self.config.prefill_rows > 1 else 1
        tokens = np.zeros((rows, chunk), np.int32)
        for row, job in enumerate(jobs):
            tokens[row, : lengths[row]] = self._token_ids(job.pending[: lengths[row]])
        address = self._address(jobs, steps, lengths, rows)
        started = time.perf_counter()
        if turn.kind == "score":
            log_probs = self._memory.run_for(steps, lambda pool: self._programs.score(pool, tokens, address))
            for job, row, length in zip(jobs, np.asarray(log_probs), lengths, strict=True):
                job.scores += row[:length].tolist()
        else:
            media = self._media_inputs(jobs, lengths, tokens.shape)
            self._memory.run_for(steps, lambda pool: (None, self._programs.prefill(pool, tokens, address, media)))
            self._memory.wait()
        took = time.perf_counter() - started
        self._memory.events.prefill_dispatches += 1
        for job, step in zip(jobs, steps, strict=True):
            self._memory.advance(job, step, job.pending[: step.tokens])
            job.pending = job.pending[step.tokens :]
            if job.score:
                job.decode_s += took / len(jobs)
            else:
                job.prefill_s += took / len(jobs)
        return failed + self._after_prompt([job for job in jobs if not job.pending.size])

    def _until_boundary(self, job: Job, tokens: int) -> int:
        """At most `tokens`, and no further than the next boundary that a checkpoint is wanted at."""
        return min([tokens, *(boundary - job.sequence.length for boundary, _ in job.boundaries)])

    def _after_prompt(self, jobs: Several[Job]) -> list[Job]:
        """Their prompts are in: on to decoding, or done."""
        for job in jobs:
            if job.scored is not None and not job.score:
                job.pending, job.score = job.scored, True
                self._memory.plan_response(job, job.scored.size)
                continue
            if job.decodes and job.wanted > 0:
                job.phase = "decode"
                self._memory.plan_response(job, job.wanted)
                if job.sampling is not None and job.sampling.stop and job.forced is None:
                    self._memory.anchor(job)
        return [self._complete(job) for job in jobs if job.phase == "prefill" and not job.pending.size]

    def _run_decode(self, turn: Turn) -> list[Job]:
        limit = self.config.steps_per_dispatch
        jobs, steps, failed = self._reserve(
            turn.jobs, [self._until_boundary(job, min(limit, job.wanted)) for job in turn.jobs]
        )
        if not jobs:
            return failed
        rows = self.config.bucket(len(jobs))
        options = [job.sampling or Sampling() for job in jobs]
        mode = SamplingMode.of(options)
        budget = np.zeros(rows, np.int32)
        budget[: len(jobs)] = [step.tokens for step in steps]
        forced = np.full((rows, limit), -1, np.int32)
        for row, (job, step) in enumerate(zip(jobs, steps, strict=True)):
            if job.forced is not None:
                at = len(job.made)
                forced[row, : step.tokens] = job.forced[at : at + step.tokens]
        stop_width = max([STOP_WIDTH, *(len(option.stop_token_ids) for option in options)])
        controls = SamplingControls.of(options, rows, stop_width)
        counts = self._counts(jobs, rows) if mode.penalised else None
        address = self._address(jobs, steps, [0] * len(steps), rows)
        started = time.perf_counter()
        output = self._memory.run_for(
            steps, lambda pool: self._programs.decode(pool, address, mode, budget, forced, controls, counts)
        )
        output = jax.device_get(output)
        took = time.perf_counter() - started
        self._memory.events.decode_dispatches += 1
        for row, (job, step) in enumerate(zip(jobs, steps, strict=True)):
            made = int(output.made[row])
            job.made += output.tokens[row, :made].tolist()
            job.log_probs += output.log_probs[row, :made].tolist()
            job.decode_s += took
            self._memory.advance(job, step, output.tokens[row, :made])
            if output.stopped[row]:
                job.finish_reason = "stop"
        return failed + self._after_decode(jobs)

    def _after_decode(self, jobs: Several[Job]) -> list[Job]:
        for job in jobs:
            if job.sampling is not None and job.sampling.stop and job.forced is None:
                kept = kept_tokens(job.made, job.sampling.stop, self.model.tokenizer.decode)
                if kept is not None:
                    self._memory.rewind(job, kept)
        finished = [job for job in jobs if job.phase == "decode" and (job.finish_reason or job.wanted == 0)]
        return [self._complete(job) for job in finished] + self._after_prompt(
            [job for job in jobs if job.phase == "prefill" and not job.pending.size]
        )

    def _address(
        self, jobs: Several[Job], steps: Several[Reservation], lengths: Several[int], rows: int
    ) -> BatchAddress:
        seeing = self.model.config.vision is not None
        offsets = [self._memory.media.offset(job.sequence._keys) for job in jobs] if seeing else None
        return address_of(steps, lengths, rows, self._memory.table_width, offsets)

    def _media_inputs(self, jobs: Several[Job], lengths: Several[int], shape: tuple[int, int]) -> MediaInputs | None:
        if self.model.config.vision is None:
            return None
        rows = []
        for job, length in zip(jobs, lengths, strict=True):
            sequence = job.sequence
            keys = np.concatenate([sequence._keys, job.pending[:length]])
            rows.append(ChunkRow(keys, sequence.length, sequence._frames))
        return self._memory.media.inputs(rows, shape)

    def _counts(self, jobs: Several[Job], rows: int) -> tuple[np.ndarray, np.ndarray]:
        vocab = self.model.config.vocab_size
        seen, made = np.zeros((2, rows, vocab), np.int32)
        for row, job in enumerate(jobs):
            seen[row] = np.bincount(job.sequence.tokens, minlength=vocab)
            made[row] = np.bincount(np.array(job.made, np.int64), minlength=vocab)
        return seen, made

    def _reserve(self, jobs: Several[Job], tokens: Several[int]) -> tuple[list[Job], list[Reservation], list[Job]]:
        """Room for each job's next tokens, evicting checkpoints and preempting later jobs where it must.

        Returns the jobs that run with their reservations, and those that failed.
        """
        runs: list[Job] = []
        steps: list[Reservation] = []
        failed: list[Job] = []
        for job, count in zip(jobs, tokens, strict=True):
            while job.phase not in ("waiting", "done"):
                try:
                    steps.append(self._memory.reserve(job.sequence.bundle, count))
                    runs.append(job)
                    break
                except CapacityError as error:
                    victim = self._scheduler.victim(spared=[*runs, job])
                    if victim is not None:
                        self._preempt(victim)
                    elif not runs:
                        failed.append(self._fail(job, error))
                    else:
                        break  # its turn comes when those that run now are done
        return runs, steps, failed

    def _preempt(self, job: Job) -> None:
        self._memory.set_aside(job)
        self._scheduler.preempt(job)

    def _fail(self, job: Job, error: JaxHybridError) -> Job:
        """Takes a job out with its error. Its sequence is released if it was made for it, else as it was before."""
        job.error = error
        self._memory.events.refusals += 1
        self._scheduler.complete(job)
        self._memory.close(job, failed=True)
        return job

    def _complete(self, job: Job) -> Job:
        job.finish_reason = job.finish_reason or ("length" if job.sampling is not None else None)
        self._scheduler.complete(job)
        self._memory.close(job, failed=False)
        return job

    def _checked(self, token_ids: TokenIds, held: int) -> Int[np.ndarray, " n"]:
        ids = check_tokens(token_ids, self.model.config)
        if held + ids.size > self._memory.max_context:
            self._memory.events.refusals += 1
            raise TokenError(
                f"{held} + {ids.size} tokens are more than the {self._memory.max_context} that one sequence may have"
            )
        return ids

    def _text(self, token_ids: TokenIds, held: int) -> Int[np.ndarray, " n"]:
        """Of tokens that come without media. A model chooses no placeholder, and none may be taken or scored."""
        ids = self._checked(token_ids, held)
        place(ids, (), self.model.config.vision)
        return ids

    def _must_have_tokens(self, sequence: Sequence) -> None:
        if not sequence.bundle.length:
            raise TokenError("a sequence needs tokens before it can be continued")

    # What sequences and marks ask of their engine

    def _logits(self, sequence: Sequence) -> Float[np.ndarray, " vocab"]:
        self._must_have_tokens(sequence)
        slots = np.array([sequence.bundle.slot], np.int32)
        return np.asarray(self._memory.read(lambda pool: self._programs.read_logits(pool, slots)))[0]

    def _token_ids(self, keys: Keys) -> Keys:
        return self._memory.media.token_ids(keys)

    def _fork(self, sequence: Sequence, branch: str | None) -> Sequence:
        return self._memory.fork(self, sequence, branch)

    def _mark(self, sequence: Sequence, pin: bool) -> Mark:
        self._must_have_tokens(sequence)
        return Mark(self, self._memory.keep(sequence, "asked_for", pin), pin, sequence._frames)

    def _unpin(self, checkpoint: Checkpoint[Bundle]) -> None:
        self._memory.index.unpin(checkpoint)

    def _release(self, sequence: Sequence) -> None:
        if self._scheduler.working_on(sequence):
            raise BusyError(f"{sequence} is being worked on; finish or cancel that first")
        self._memory.release(sequence)
