"""Why a call could not go on from where the call before it ended."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int32

REMEMBERED_CALLS = 4


@dataclass(frozen=True)
class Divergence:
    """The first token in which a call differs from an earlier one of its branch."""

    kind: Literal["template", "context_edit"]
    position: int
    expected: int
    got: int


@dataclass(frozen=True)
class _Call:
    """Prompt and response. `turns`: (turn start, end) of each response known to lie in them, the call's own last."""

    tokens: Int32[np.ndarray, " n"]
    turns: tuple[tuple[int, int], ...]

    def in_response(self, position: int, own: bool) -> bool:
        """Whether the token there came out of a model's turn; with `own`, the call's own counts too."""
        turns = self.turns if own else self.turns[:-1]
        return any(start <= position < end for start, end in turns)


class Lineage:
    """The last calls of each branch of each trajectory, as token ids."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], dict[str, deque[_Call]]] = {}

    def add(self, tenant: str, trajectory: str, branch: str, tokens: Int32[np.ndarray, " n"], turn_start: int) -> None:
        """A finished call: prompt and response, and where its generation prompt began."""
        branches = self._calls.setdefault((tenant, trajectory), {})
        before, shared = _closest((call for calls in branches.values() for call in calls), tokens)
        known = [] if before is None else [turn for turn in before.turns if turn[1] <= min(shared, turn_start)]
        if known and known[-1][1] == turn_start:  # a prompt, and its continuation in a call of its own: one turn
            turn_start = known.pop()[0]
        call = _Call(tokens, (*known, (turn_start, tokens.size)))
        branches.setdefault(branch, deque(maxlen=REMEMBERED_CALLS)).append(call)

    def divergence(
        self, tenant: str, trajectory: str, branch: str, prompt: Int32[np.ndarray, " n"]
    ) -> Divergence | None:
        """Where `prompt` leaves the earlier call it has most in common with; None if it extends or repeats it.

        Within a response, which the caller did not write, the template rendered it anew: the last one, or an earlier
        one whose reasoning is left out from now on. Elsewhere the caller changed something. A branch's first call is
        held against those of the other branches: there only a response before the fork says anything, since what
        follows the fork is meant to differ.
        """
        branches = self._calls.get((tenant, trajectory), {})
        continues = branch in branches
        calls = branches[branch] if continues else (call for calls in branches.values() for call in calls)
        best, shared = _closest(calls, prompt)
        if best is None or shared in (best.tokens.size, prompt.size):
            return None
        rewritten = best.in_response(shared, own=continues)
        if not (rewritten or continues):
            return None
        kind: Literal["template", "context_edit"] = "template" if rewritten else "context_edit"
        return Divergence(kind, shared, int(best.tokens[shared]), int(prompt[shared]))

    def forget(self, tenant: str | None, trajectory: str | None) -> None:
        """Forgets the branches that fit all that is given."""
        for key in list(self._calls):
            if tenant in (None, key[0]) and trajectory in (None, key[1]):
                del self._calls[key]


def _closest(calls: Iterable[_Call], tokens: Int32[np.ndarray, " n"]) -> tuple[_Call | None, int]:
    """The call with the longest opening in common, the latest of equals, and that length."""
    best, shared = None, 0
    for call in calls:
        length = common_prefix(call.tokens, tokens)
        if length >= shared:
            best, shared = call, length
    return best, shared


def common_prefix(a: Int32[np.ndarray, " n"], b: Int32[np.ndarray, " m"]) -> int:
    """Number of leading tokens that are equal."""
    size = min(a.size, b.size)
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size
