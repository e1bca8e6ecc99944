"""Random programs of prefill, extend, generate, fork, checkpoint, resume, release and delete on one poisoned engine.

Whatever happened before, every live sequence's logits are those of the same tokens run alone from scratch.
"""

import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import jaxhybrid as jh
from jaxhybrid.errors import CapacityError, ReleasedError

CONFIG = jh.EngineConfig(
    max_sequences=4, max_tokens=640, max_context=160, page_size=8, max_checkpoints=8, prefill_chunks=(5, 16),
    steps_per_dispatch=4, retention=jh.Retention(every=32), poison=True,
)  # fmt: skip
# Few different tokens and shared beginnings, so that prompts meet each other's paths.
OPENINGS = ([3, 5, 7] * 9, [3, 5, 7] * 4 + [11] * 9, [2] * 20)
TAILS = st.lists(st.integers(2, 8), max_size=30)
STEPS = st.integers(1, 9)


@functools.cache
def engine_of(model: jh.Model) -> jh.Engine:
    """One engine for all examples: its programs are compiled once, and a leak of one shows in the next."""
    return jh.Engine(model, CONFIG)


class Programs(RuleBasedStateMachine):
    model: jh.Model
    sequences = Bundle("sequences")
    marks = Bundle("marks")

    @initialize()
    def start(self) -> None:
        self.engine = engine_of(self.model)
        self.live: list[jh.Sequence] = []
        self.pins: list[jh.Mark] = []

    def expected(self, tokens: np.ndarray) -> np.ndarray:
        return reference(self.model, tuple(tokens.tolist()))

    def attempt(self, action, *arguments, **options):
        """None where the pool is full, which is an answer too: everything else must be as it was."""
        before = [sequence.tokens for sequence in self.live]
        try:
            return action(*arguments, **options)
        except CapacityError:
            assert all(np.array_equal(s.tokens, b) for s, b in zip(self.live, before, strict=True))
            return None

    @rule(
        target=sequences,
        opening=st.sampled_from(OPENINGS),
        tail=TAILS,
        back=st.integers(0, 6),
        run=st.sampled_from("ab"),
    )
    def prefill(self, opening, tail, back, run):
        ids = [*opening, *tail]
        starts = {"turn_start": max(0, len(ids) - back), "message_start": len(opening)}
        made = self.attempt(self.engine.prefill, ids, trajectory=run, **starts)
        if made is None:
            return multiple()
        assert made.tokens.tolist() == ids
        assert 0 <= made.reuse.resumed <= made.reuse.matched <= len(ids)
        self.live.append(made)
        return made

    @rule(sequence=sequences, tail=TAILS.filter(len))
    def extend(self, sequence, tail):
        if sequence in self.live and sequence.length + len(tail) <= CONFIG.max_context:
            before = sequence.tokens
            if self.attempt(self.engine.extend, sequence, tail) is not None:
                assert sequence.tokens.tolist() == [*before.tolist(), *tail]

    @rule(count=st.integers(1, 3), steps=STEPS, forced=st.booleans())
    def generate(self, count, steps, forced):
        rows = [s for s in self.live if s.length + steps <= CONFIG.max_context][:count]
        if not rows:
            return
        before = [row.tokens for row in rows]
        response = [[4] * steps for _ in rows] if forced else None
        made = self.attempt(self.engine.generate, rows, jh.Sampling(max_tokens=steps), response)
        for number, generation in enumerate(made or []):
            assert rows[number].tokens.tolist() == [*before[number].tolist(), *generation.tokens]
            if not forced:
                assert generation.tokens[0] == int(self.expected(before[number]).argmax())

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        if sequence not in self.live or len(self.live) >= 8:
            return multiple()
        child = sequence.fork()
        self.live.append(child)
        return child

    @rule(target=marks, sequence=sequences, pin=st.booleans())
    def checkpoint(self, sequence, pin):
        if sequence not in self.live or (pin and len(self.pins) >= 3):
            return multiple()
        mark = sequence.checkpoint(pin=pin)
        if pin:
            self.pins.append(mark)
        return mark

    @rule(target=sequences, mark=marks)
    def resume(self, mark):
        if len(self.live) >= 8:
            return multiple()
        if not mark.alive:
            with pytest.raises(ReleasedError, match="was evicted or deleted"):
                self.engine.resume(mark)
            return multiple()
        sequence = self.engine.resume(mark)
        assert sequence.length == mark.length
        self.live.append(sequence)
        return sequence

    @rule(sequence=consumes(sequences))
    def release(self, sequence):
        if sequence in self.live:
            self.live.remove(sequence)
            sequence.release()
        with pytest.raises(ReleasedError, match="was released"):
            sequence.release()

    @rule(run=st.sampled_from("ab"))
    def delete(self, run):
        self.engine.delete(trajectory=run)
        self.live = [sequence for sequence in self.live if sequence.trajectory != run]
        self.pins = [mark for mark in self.pins if mark.alive]

    @invariant()
    def live_sequences_are_as_if_alone(self) -> None:
        for sequence in getattr(self, "live", [])[-3:]:
            difference = np.abs(sequence.logits() - self.expected(sequence.tokens)).max()
            assert difference < 2e-4, f"{sequence}: logits differ by {difference}"

    def teardown(self) -> None:
        for sequence in self.live:
            sequence.release()
        for mark in self.pins:
            if mark.alive:
                mark.release()
        self.engine.delete(tenant="default")
        stats = self.engine.stats()
        assert (stats.live_slots, stats.live_pages, stats.live_sequences, stats.retained_checkpoints) == (0, 0, 0, 0)
        assert stats.recurrent_bytes_copied == 0


@functools.cache
def reference(model: jh.Model, tokens: tuple[int, ...]) -> np.ndarray:
    return np.asarray(jh.forward(model, list(tokens)))[-1]


def test_random_programs(tiny_model: jh.Model) -> None:
    Programs.model = tiny_model
    run = settings(
        max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Programs, settings=run)
