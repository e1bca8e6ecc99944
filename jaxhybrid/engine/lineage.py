"""Why a call could not go on from where the call before it ended."""

from collections import deque
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
    tokens: Int32[np.ndarray, " n"]
    turn_start: int


class Lineage:
    """The last calls of each branch of each trajectory, as token ids."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, str], deque[_Call]] = {}

    def add(self, tenant: str, trajectory: str, branch: str, tokens: Int32[np.ndarray, " n"], turn_start: int) -> None:
        """A finished call: prompt and response, and where its generation prompt began."""
        calls = self._calls.setdefault((tenant, trajectory, branch), deque(maxlen=REMEMBERED_CALLS))
        calls.append(_Call(tokens, turn_start))

    def divergence(
        self, tenant: str, trajectory: str, branch: str, prompt: Int32[np.ndarray, " n"]
    ) -> Divergence | None:
        """Where `prompt` leaves the earlier call it has most in common with; None if it extends or repeats it.

        Past that call's turn start only its response lay, which the caller did not write: the template rendered it
        anew. Before that, the caller changed something.
        """
        best, shared = None, -1
        for call in self._calls.get((tenant, trajectory, branch), ()):
            length = common_prefix(call.tokens, prompt)
            if length >= shared:
                best, shared = call, length
        if best is None or shared in (best.tokens.size, prompt.size):
            return None
        kind: Literal["template", "context_edit"] = "template" if shared >= best.turn_start else "context_edit"
        return Divergence(kind, shared, int(best.tokens[shared]), int(prompt[shared]))

    def forget(self, tenant: str | None, trajectory: str | None) -> None:
        """Forgets the branches that fit all that is given."""
        for key in list(self._calls):
            if tenant in (None, key[0]) and trajectory in (None, key[1]):
                del self._calls[key]


def common_prefix(a: Int32[np.ndarray, " n"], b: Int32[np.ndarray, " m"]) -> int:
    """Number of leading tokens that are equal."""
    size = min(a.size, b.size)
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size
