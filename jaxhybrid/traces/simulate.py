"""Policy study on token ids alone: what each way of keeping checkpoints would have had to compute, without a model.

Trajectories go through the index and the retention rules that the engine uses, so that what is counted here is what the
engine does. Every policy sees the same known paths; they differ in the boundaries at which state is kept.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from jaxtyping import Int32

from jaxhybrid.cache.prefix_index import Checkpoint, PrefixIndex
from jaxhybrid.cache.retention import Kind, Retention, boundaries, response_boundaries
from jaxhybrid.errors import ConfigError
from jaxhybrid.traces.trajectory import TokenCall, TokenTrajectory

Tokens = Int32[np.ndarray, "n"]
Policies = set[str]
"""The payload of a checkpoint in the study: the names of the policies that hold it."""


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy computed over a set of trajectories. Counts are tokens unless said otherwise.

    computed_tokens: prompt tokens that went through prefill, which are all but those resumed from a checkpoint.
    gap_tokens: those of them that had been computed before.
    growth_tokens: what the calls added to their contexts; see `call_growth`.
    amplification: (computed_tokens + generated_tokens) / growth_tokens; never below 1, which is perfect.
    hit_rate: share of the prompt tokens that was resumed.
    extra_prefill: computed_tokens over those of a perfect token-level cache, minus 1.
    peak_checkpoints: the most checkpoints held at once.
    gap_by_call: the gap of every trajectory's first call, second call, ..., summed over trajectories.
    """

    policy: str
    calls: int
    prompt_tokens: int
    growth_tokens: int
    computed_tokens: int
    gap_tokens: int
    amplification: float
    hit_rate: float
    extra_prefill: float
    peak_checkpoints: int
    gap_by_call: tuple[int, ...]
    generated_tokens: int = 0


@dataclass(frozen=True)
class Policy:
    """A named retention. None stands for the perfect token-level cache, which resumes from any token it has seen."""

    name: str
    retention: Retention | None


_NOTHING = Retention(
    prompt_end=False, response_end=False, turn_start=False, message_start=False, junctions=False
)  # fmt: skip
_PROMPT_END = replace(_NOTHING, prompt_end=True)

POLICIES = (
    Policy("none", _NOTHING),
    Policy("prompt end", _PROMPT_END),
    Policy("+ response end", replace(_PROMPT_END, response_end=True)),
    Policy("+ turn start", Retention(message_start=False, junctions=False)),
    Policy("+ junctions", Retention(message_start=False)),
    Policy("+ message start", Retention()),
    Policy("+ every 1024", Retention(every=1024)),
    Policy("grid 512", replace(_NOTHING, every=512)),
    Policy("grid 1024", replace(_NOTHING, every=1024)),
    Policy("grid 1600", replace(_NOTHING, every=1600)),
    Policy("grid 4096", replace(_NOTHING, every=4096)),
    Policy("prompt end, grid 1024", replace(_PROMPT_END, every=1024)),
    Policy("prompt end, grid 4096", replace(_PROMPT_END, every=4096)),
    Policy("perfect", None),
)
"""From nothing to all that the engine can keep, each a superset of the one before ("+"); the grids of block-aligned
engines, alone and with prompt ends; and the bound."""


def call_growth(context: int, parent_context: int | None, unseen: int) -> int:
    """Tokens that a call added to the context it continues; what it computes over that is its amplification.

    That is the context it ended with minus its parent's, but at most `unseen`, the prompt tokens that no one had seen
    and the response: where another trajectory or a sibling had read the same, the cache has it already, and no one
    needs to compute it again. A call that starts afresh or shortens its context counts `unseen`.
    """
    grown = 0 if parent_context is None else context - parent_context
    return min(grown, unseen) if grown > 0 else unseen


def simulate(
    trajectories: Iterable[TokenTrajectory],
    policies: Sequence[Policy] = POLICIES,
    *,
    max_checkpoints: int | None = None,
    shared: bool = True,
    block_size: int | None = None,
) -> tuple[PolicyResult, ...]:
    """Runs a `Study` over `trajectories`, one after another, each read once; the results are in order of `policies`."""
    study = Study(policies, max_checkpoints=max_checkpoints, shared=shared, block_size=block_size)
    for trajectory in trajectories:
        study.add(trajectory)
    return study.results()


class Study:
    """Counts what each policy computes as trajectories are added.

    max_checkpoints: how many each policy may hold; beyond it the least recently used go. None: all are kept.
    shared: one cache for all trajectories. Otherwise each finds an empty one and leaves nothing, so that memory is that
        of the largest trajectory.
    block_size: see prompts as traces of block hashes show them: only whole blocks of this many tokens can match, a
        prompt ends with its last whole block, and what a response was is not known.
    """

    def __init__(
        self,
        policies: Sequence[Policy] = POLICIES,
        *,
        max_checkpoints: int | None = None,
        shared: bool = True,
        block_size: int | None = None,
    ) -> None:
        for name, value in (("max_checkpoints", max_checkpoints), ("block_size", block_size)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1 or None, got {value}")
        self._index: PrefixIndex[Policies] = PrefixIndex()
        self._tallies = [_Tally(policy, max_checkpoints) for policy in policies]
        self._shared = shared
        self._block_size = block_size
        self._calls = self._prompt = self._growth = self._generated = self._new = 0

    def add(self, trajectory: TokenTrajectory) -> None:
        """Runs the calls of one trajectory through the cache, in their order."""
        identity = "" if self._shared else trajectory.id
        contexts: list[int] = []
        for number, call in enumerate(trajectory.calls):
            new = self._prefill(identity, call, number)
            generated = 0
            if self._block_size is None:
                generated = len(call.response_ids)
                self._generate(identity, call)
            contexts.append(len(call.prompt_ids) + generated)
            parent = None if call.parent is None else contexts[call.parent]
            self._calls += 1
            self._prompt += len(call.prompt_ids)
            self._generated += generated
            self._new += new
            self._growth += call_growth(contexts[-1], parent, new + generated)
        if not self._shared:
            self._index.drop(identity=identity)
            for tally in self._tallies:
                tally.held.clear()

    def results(self) -> tuple[PolicyResult, ...]:
        """The counts so far, in order of the policies."""
        return tuple(self._result(tally) for tally in self._tallies)

    def _prefill(self, identity: str, call: TokenCall, number: int) -> int:
        """Counts one prompt under every policy; returns how many of its tokens had never been seen."""
        prompt = call.prompt_ids[: self._whole(len(call.prompt_ids))]
        match = self._index.match(identity, prompt)
        matched = self._whole(match.matched)
        points = self._index.resume_points(identity, prompt[:matched])
        wanted: dict[int, list[_Tally]] = defaultdict(list)
        kinds: dict[int, Kind] = {}
        for tally in self._tallies:
            resumed = tally.resume(points, matched)
            tally.count(number, len(call.prompt_ids), matched, resumed)
            if tally.policy.retention is not None:
                for n, kind in boundaries(
                    tally.policy.retention,
                    length=len(prompt),
                    resumed=resumed,
                    matched=matched,
                    left_known_path=match.left_known_path,
                    turn_start=call.turn_start,
                    message_start=call.message_start,
                ):
                    wanted[n].append(tally)
                    kinds.setdefault(n, kind)
        self._index.insert(identity, prompt)
        self._keep(identity, prompt, wanted, kinds)
        return len(call.prompt_ids) - matched

    def _generate(self, identity: str, call: TokenCall) -> None:
        tokens = np.concatenate([call.prompt_ids, call.response_ids])
        wanted: dict[int, list[_Tally]] = defaultdict(list)
        kinds: dict[int, Kind] = {}
        for tally in self._tallies:
            if tally.policy.retention is not None:
                for n, kind in response_boundaries(
                    tally.policy.retention, prompt_length=len(call.prompt_ids), length=len(tokens)
                ):
                    wanted[n].append(tally)
                    kinds.setdefault(n, kind)
        self._index.insert(identity, tokens)
        self._keep(identity, tokens, wanted, kinds)

    def _keep(self, identity: str, tokens: Tokens, wanted: dict[int, list[_Tally]], kinds: dict[int, Kind]) -> None:
        for n in sorted(wanted):
            checkpoint = self._index.attach(identity, tokens[:n], set(), kinds[n])
            for tally in wanted[n]:
                for dropped in tally.keep(checkpoint):
                    self._index.remove(dropped)

    def _whole(self, length: int) -> int:
        return length if self._block_size is None else length // self._block_size * self._block_size

    def _result(self, tally: _Tally) -> PolicyResult:
        return PolicyResult(
            policy=tally.policy.name,
            calls=self._calls,
            prompt_tokens=self._prompt,
            growth_tokens=self._growth,
            computed_tokens=tally.computed,
            gap_tokens=sum(tally.gap_by_call),
            amplification=(tally.computed + self._generated) / self._growth if self._growth else 1.0,
            hit_rate=1 - tally.computed / self._prompt if self._prompt else 0.0,
            extra_prefill=tally.computed / self._new - 1 if self._new else 0.0,
            peak_checkpoints=tally.peak,
            gap_by_call=tuple(tally.gap_by_call),
            generated_tokens=self._generated,
        )


@dataclass(eq=False)
class _Tally:
    """One policy's checkpoints, least recently used first, and its counts."""

    policy: Policy
    max_checkpoints: int | None
    held: OrderedDict[Checkpoint[Policies], None] = field(default_factory=OrderedDict)
    computed: int = 0
    peak: int = 0
    gap_by_call: list[int] = field(default_factory=list)

    def resume(self, points: Sequence[Checkpoint[Policies]], matched: int) -> int:
        """The boundary to resume from: the deepest of `points` that is held. Counts as a use of it."""
        if self.policy.retention is None:
            return matched
        deepest = next((point for point in reversed(points) if point in self.held), None)
        if deepest is None:
            return 0
        self.held.move_to_end(deepest)
        return deepest.length

    def count(self, number: int, prompt: int, matched: int, resumed: int) -> None:
        self.computed += prompt - resumed
        if number == len(self.gap_by_call):
            self.gap_by_call.append(0)
        self.gap_by_call[number] += matched - resumed

    def keep(self, checkpoint: Checkpoint[Policies]) -> list[Checkpoint[Policies]]:
        """Holds a checkpoint, as the most recently used; returns those given up for it that no other policy holds."""
        checkpoint.payload.add(self.policy.name)
        self.held[checkpoint] = None
        self.held.move_to_end(checkpoint)
        orphans = []
        while self.max_checkpoints is not None and len(self.held) > self.max_checkpoints:
            given_up, _ = self.held.popitem(last=False)
            given_up.payload.discard(self.policy.name)
            if not given_up.payload:
                orphans.append(given_up)
        self.peak = max(self.peak, len(self.held))
        return orphans
