"""What an engine remembers: the pool, the index of retained bundles, and the accounts of both."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jaxtyping import Int32

from jaxhybrid.cache.prefix_index import Checkpoint, Match, PrefixIndex
from jaxhybrid.cache.retention import boundaries, response_boundaries
from jaxhybrid.engine.config import EngineConfig
from jaxhybrid.engine.dispatch import page_copies
from jaxhybrid.engine.identity import schema_of
from jaxhybrid.engine.job import Job
from jaxhybrid.engine.lineage import Divergence, Lineage
from jaxhybrid.engine.media_memory import MediaMemory
from jaxhybrid.engine.poison import poison_freed
from jaxhybrid.engine.programs import Programs
from jaxhybrid.engine.sequence import LimitedBy, Reuse, Sequence
from jaxhybrid.engine.stats import EngineStats, EventCounters, TokenCounters
from jaxhybrid.errors import ReleasedError
from jaxhybrid.model import Model
from jaxhybrid.state.arrays import PoolArrays
from jaxhybrid.state.pool import EMPTY, Bundle, Reservation, StatePool, cut_short
from pallas_kernels import registry

if TYPE_CHECKING:
    from jaxhybrid.engine.engine import Engine

R = TypeVar("R")


class StateMemory:
    """Owns every reference to the pool: those of live sequences, of retained bundles and of steps under way."""

    def __init__(self, model: Model, config: EngineConfig, programs: Programs) -> None:
        self._model, self._config, self._programs = model, config, programs
        pages = -(-config.max_tokens // config.page_size)
        self.pool = StatePool(
            model.layout, config.max_sequences + config.max_checkpoints, pages, config.page_size,
            poison=partial(poison_freed, model.layout, model.pool_places) if config.poison else None,
            places=model.pool_places,
        )  # fmt: skip
        self.index: PrefixIndex[Bundle] = PrefixIndex(max_tokens=config.max_known_tokens)
        limit = min(config.max_tokens, model.config.max_position_embeddings)
        self.max_context = min(limit, config.max_context or limit)
        self.table_width = -(-self.max_context // config.page_size)
        self.events = EventCounters()
        self._tokens = TokenCounters()
        self._by_trajectory: dict[str, TokenCounters] = {}
        self.media = MediaMemory(model)
        self._lineage = Lineage()
        self._identities: dict[str, str] = {}
        self._live: dict[int, Sequence] = {}

    def identity(self, tenant: str) -> str:
        """Fingerprint of everything a tenant's bundles are bound to."""
        if tenant not in self._identities:
            self._identities[tenant] = schema_of(self._model, self._config.page_size, tenant).fingerprint()
        return self._identities[tenant]

    # Programs on the pool

    def run(self, program: Callable[[PoolArrays], PoolArrays]) -> None:
        """Gives the pool's arrays to a program that returns them."""
        self.pool.put(program(self.pool.take()))

    def run_for(self, steps: Several[Reservation], program: Callable[[PoolArrays], tuple[R, PoolArrays]]) -> R:
        """As `run`, for a step of sequences: pages that must be copied are copied first."""
        copies = page_copies(steps)
        if copies is not None:
            self.run(lambda pool: self._programs.copy_pages(pool, *copies))
        result, arrays = program(self.pool.take())
        self.pool.put(arrays)
        return result

    def read(self, program: Callable[[PoolArrays], R]) -> R:
        """A program that only reads the pool."""
        arrays = self.pool.take()
        try:
            return program(arrays)
        finally:
            self.pool.put(arrays)

    def wait(self) -> None:
        """Until the device has done what was dispatched."""
        self.read(lambda pool: jax.block_until_ready(pool["output"]))

    # Sequences

    def new_sequence(self, engine: Engine, tenant: str, trajectory: str | None, branch: str) -> Sequence:
        sequence = Sequence(engine, self.pool.retain(EMPTY), tenant, trajectory, branch)
        self._live[id(sequence)] = sequence
        return sequence

    def fork(self, engine: Engine, sequence: Sequence, branch: str | None) -> Sequence:
        child = Sequence(
            engine, self.pool.retain(sequence.bundle), sequence.tenant, sequence.trajectory, branch or sequence.branch
        )
        child._append(sequence._keys, sequence.bundle)
        child._frames = dict(sequence._frames)
        self._live[id(child)] = child
        self.events.forks += 1
        return child

    def resume(self, engine: Engine, checkpoint: Checkpoint[Bundle], trajectory: str | None, branch: str) -> Sequence:
        if not checkpoint.alive:
            raise ReleasedError(f"the checkpoint at token {checkpoint.length} was evicted or deleted")
        self.index.touch(checkpoint)
        self.events.restores += 1
        bundle = self.pool.retain(checkpoint.payload)
        sequence = Sequence(engine, bundle, checkpoint.tenant or "default", trajectory, branch)
        sequence._append(self.index.tokens(checkpoint), bundle)
        sequence.reuse = Reuse(bundle.length, bundle.length, "none")
        self._live[id(sequence)] = sequence
        return sequence

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.bundle)
        sequence._bundle = None
        self._live.pop(id(sequence), None)

    # A job's way

    def open(self, job: Job) -> None:
        """Before a job's first step: finds the longest complete prefix, or notes where the sequence stood."""
        if not job.looked_up:
            job.prompt_length = job.sequence.length + job.pending.size
        if job.fresh:
            self._find_prefix(job)
            return
        self.anchor(job)
        start = job.sequence.length
        self._plan_boundaries(job, resumed=start, matched=start, left=False)

    def anchor(self, job: Job) -> None:
        """Holds on to the sequence as it is now, to go back to."""
        if job.anchor is None:
            job.anchor = self.pool.retain(job.sequence.bundle)

    def _find_prefix(self, job: Job) -> None:
        sequence, prompt = job.sequence, job.pending
        identity = self.identity(sequence.tenant)
        match = self.index.match(identity, prompt)
        base = self._resume_point(identity, prompt, match)
        if not job.looked_up:
            job.looked_up = True
            divergence = None
            if sequence.trajectory is not None:
                divergence = self._lineage.divergence(sequence.tenant, sequence.trajectory, sequence.branch, prompt)
            sequence.reuse = self._reuse(match.matched, base.length, divergence)
        if base.length:
            self.events.restores += 1
            self.pool.release(sequence.bundle)
            sequence._append(prompt[: base.length], self.pool.retain(base))
            job.pending = prompt[base.length :]
        self._plan_boundaries(job, base.length, match.matched, match.left_known_path)
        self.index.insert(identity, prompt)

    def _resume_point(self, identity: str, prompt: Int32[np.ndarray, " n"], match: Match[Bundle]) -> Bundle:
        """The deepest complete bundle on the prompt's path; where nothing is recurrent, any deeper one cut short."""
        found = match.checkpoint
        cut = min(match.matched, prompt.size - 1)
        if not self.pool.layout.recurrent and cut > match.resumed:
            donor = self.index.beyond(identity, prompt[: match.matched])
            if donor is not None:
                self.index.touch(donor)
                return cut_short(donor.payload, cut, self.pool.page_size)
        if found is None:
            return EMPTY
        self.index.touch(found)
        return found.payload

    def _reuse(self, matched: int, resumed: int, divergence: Divergence | None) -> Reuse:
        limited_by: LimitedBy = "none"
        differing = None
        if divergence is not None:
            limited_by = divergence.kind
            expected, got = self.media.token_ids(np.array([divergence.expected, divergence.got], np.int32)).tolist()
            differing = (divergence.position, expected, got)
        elif matched == 0:
            limited_by = "cold"
        elif matched > resumed:
            limited_by = "recurrent" if self.pool.layout.recurrent else "pages"
        return Reuse(matched, resumed, limited_by, differing)

    def _plan_boundaries(self, job: Job, resumed: int, matched: int, left: bool) -> None:
        job.boundaries = deque(
            boundaries(
                self._config.retention, length=job.prompt_length, resumed=resumed, matched=matched,
                left_known_path=left, turn_start=job.turn_start, message_start=job.message_start,
            )
        )  # fmt: skip

    def plan_response(self, job: Job, length: int) -> None:
        """Boundaries within a response of up to `length` tokens; its end is kept when it is reached."""
        start = job.sequence.length
        ahead = response_boundaries(self._config.retention, prompt_length=start, length=start + length)
        job.boundaries = deque((boundary, kind) for boundary, kind in ahead if kind == "every")

    def reserve(self, bundle: Bundle, tokens: int) -> Reservation:
        """Room for a step, evicting checkpoints where that helps. Raises CapacityError."""
        need = self.pool.need(bundle, tokens)
        while self.pool.free_slots < need.slots or self.pool.free_pages < need.pages:
            if not self._evict(self.pool.free_slots < need.slots):
                break
        return self.pool.reserve(bundle, tokens)

    def _evict(self, for_slot: bool) -> bool:
        """Drops the least recently used checkpoint whose going frees a slot, or a page; False if there is none.

        Checkpoints may share pages among themselves: where no single one frees any, the least recently used goes.
        """
        unpinned = [checkpoint for checkpoint in self.index if not checkpoint.pinned]
        frees = self.pool.frees_slot if for_slot else self.pool.frees_page
        last_resort = None if for_slot else next(iter(unpinned), None)
        checkpoint = next((each for each in unpinned if frees(each.payload)), last_resort)
        if checkpoint is None:
            return False
        self.pool.release(self.index.remove(checkpoint))
        self.events.evictions += 1
        return True

    def advance(self, job: Job, step: Reservation, tokens: Int32[np.ndarray, " n"]) -> None:
        """A step is done: the sequence holds `tokens` more, and is retained where the policy says so."""
        sequence = job.sequence
        sequence._append(tokens, self.pool.commit(step, len(tokens)))
        while job.boundaries and job.boundaries[0][0] <= sequence.length:
            boundary, kind = job.boundaries.popleft()
            assert boundary == sequence.length, f"a {kind} checkpoint for token {boundary} came at {sequence.length}"
            self.keep(sequence, kind, pin=False)

    def keep(self, sequence: Sequence, kind: str, pin: bool) -> Checkpoint[Bundle]:
        """Retains the sequence's bundle under its tokens; one that is there already serves as well."""
        # A copy, so that a payload already there is told from this one even where both name the same memory.
        held = dataclasses.replace(self.pool.retain(sequence.bundle))
        checkpoint = self.index.attach(
            self.identity(sequence.tenant), sequence._keys, held, kind,
            pinned=pin, trajectory=sequence.trajectory, tenant=sequence.tenant,
        )  # fmt: skip
        if checkpoint.payload is held:
            self.events.checkpoints[kind] = self.events.checkpoints.get(kind, 0) + 1
        else:
            self.pool.release(held)
        return checkpoint

    def rewind(self, job: Job, kept: int) -> None:
        """Back to the prompt and the first `kept` tokens made: state of later tokens is let go, the rest recomputed."""
        sequence = job.sequence
        target = sequence._keys[: job.prompt_length + kept]
        job.made, job.log_probs, job.finish_reason = job.made[:kept], job.log_probs[:kept], "stop"
        if target.size == sequence.length:
            return
        self.pool.release(sequence.bundle)
        base, job.anchor = job.anchor, None
        if base is None or base.length > target.size:
            if base is not None:
                self.pool.release(base)
            base = self.pool.retain(EMPTY)
        sequence._keys = target[:0]
        sequence._append(target[: base.length], base)
        job.pending, job.phase = target[base.length :], "prefill"

    def set_aside(self, job: Job) -> None:
        """Lets go of a job's state, kept as a checkpoint for as long as there is room; its tokens become pending."""
        sequence = job.sequence
        if sequence.length:
            self.keep(sequence, "preempted", pin=False)
        self._drop_anchor(job)
        job.pending, job.opened = np.concatenate([sequence._keys, job.pending]), False
        if job.score:  # scored anew from the prompt's end, so that no token is scored twice, nor one of the prompt
            job.pending, job.score, job.scores = job.pending[: job.prompt_length], False, []
        self.pool.release(sequence.bundle)
        sequence._bundle, sequence._keys = self.pool.retain(EMPTY), sequence._keys[:0]
        self.events.preemptions += 1

    def close(self, job: Job, failed: bool) -> None:
        """A job's end: what it made is retained and becomes known, or everything is as it was before it."""
        sequence = job.sequence
        if failed:
            self._undo(job)
            return
        self._drop_anchor(job)
        if job.fresh:
            self._count_prompt(sequence, job.prompt_length)
        if job.responds:
            made = sequence.length - job.prompt_length
            if made and self._config.retention.response_end:
                self.keep(sequence, "response_end", pin=False)
            self._count_generated(sequence, made)
        self.index.insert(self.identity(sequence.tenant), sequence._keys)
        if sequence.trajectory is not None:
            turn_start = job.prompt_length if job.turn_start is None else job.turn_start
            self._lineage.add(sequence.tenant, sequence.trajectory, sequence.branch, sequence._keys, turn_start)

    def _undo(self, job: Job) -> None:
        sequence, base = job.sequence, job.anchor
        job.anchor = None
        if job.fresh or base is None:
            if base is not None:
                self.pool.release(base)
            if sequence._bundle is not None and job.fresh:
                self.release(sequence)
            return
        tokens = sequence._keys[: base.length]
        self.pool.release(sequence.bundle)
        sequence._keys = tokens[:0]
        sequence._append(tokens, base)

    def _drop_anchor(self, job: Job) -> None:
        if job.anchor is not None:
            self.pool.release(job.anchor)
            job.anchor = None

    def delete(self, trajectory: str | None, tenant: str | None) -> int:
        """Lets go of all that a trajectory or tenant left; see Engine.delete."""
        for sequence in list(self._live.values()):
            if trajectory in (None, sequence.trajectory) and tenant in (None, sequence.tenant):
                self.release(sequence)
        payloads = self.index.drop(trajectory=trajectory, tenant=tenant)
        for bundle in payloads:
            self.pool.release(bundle)
        self._lineage.forget(tenant, trajectory)
        return len(payloads)

    # Accounts

    def _accounts(self, sequence: Sequence) -> list[TokenCounters]:
        if sequence.trajectory is None:
            return [self._tokens]
        return [self._tokens, self._by_trajectory.setdefault(sequence.trajectory, TokenCounters())]

    def _count_prompt(self, sequence: Sequence, size: int) -> None:
        reuse = sequence.reuse
        for account in self._accounts(sequence):
            account.calls += 1
            account.prompt += size
            account.reused += reuse.resumed
            account.gap += reuse.gap
            account.new += size - reuse.matched
            account.limited_by[reuse.limited_by] = account.limited_by.get(reuse.limited_by, 0) + 1

    def _count_generated(self, sequence: Sequence, made: int) -> None:
        for account in self._accounts(sequence):
            account.generated += made

    def stats(self, compiled_programs: int) -> EngineStats:
        pool = self.pool
        return EngineStats(
            tokens=dataclasses.replace(self._tokens, limited_by=dict(self._tokens.limited_by)),
            events=dataclasses.replace(self.events, checkpoints=dict(self.events.checkpoints)),
            by_trajectory={name: dataclasses.replace(count) for name, count in self._by_trajectory.items()},
            compiled_programs=compiled_programs,
            live_sequences=len(self._live),
            retained_checkpoints=len(self.index),
            live_slots=pool.live_slots,
            free_slots=pool.free_slots,
            live_pages=pool.live_pages,
            free_pages=pool.free_pages,
            live_bytes=dict(pool.live_bytes()),
            kernel_fallbacks=registry.recorder().fallbacks(),
            **_counters(pool),
        )


def _counters(pool: StatePool) -> dict[str, Any]:
    return dataclasses.asdict(pool.counters)
