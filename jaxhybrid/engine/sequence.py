"""What users hold: a live sequence, and a retained bundle it can be resumed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float, Int32

from jaxhybrid.cache.prefix_index import Checkpoint
from jaxhybrid.engine.media_memory import Keys
from jaxhybrid.errors import ReleasedError
from jaxhybrid.media import Frame
from jaxhybrid.state.pool import Bundle

if TYPE_CHECKING:
    from jaxhybrid.engine.engine import Engine

LimitedBy = Literal["none", "cold", "recurrent", "pages", "template", "context_edit"]


@dataclass(frozen=True)
class Reuse:
    """What a prompt found.

    matched: tokens of the longest known prefix. resumed: the boundary of the bundle it went on from. limited_by: what
    kept it from resuming further: `none` (all that is known was reused), `cold` (nothing was known), `recurrent` or
    `pages` (the state of that kind was not kept at the matched boundary), `template` (the chat template rendered an
    earlier response otherwise than it was generated), `context_edit` (the caller changed an earlier message).
    differing: (position, token of the earlier call, token of this one) where one of the last two applies.
    """

    matched: int = 0
    resumed: int = 0
    limited_by: LimitedBy = "cold"
    differing: tuple[int, int, int] | None = None

    @property
    def gap(self) -> int:
        """Recomputation gap in tokens: known, but computed again."""
        return self.matched - self.resumed


@dataclass(frozen=True)
class Generation:
    """`tokens` were made and processed; the stop token, if one ended them, is in neither. `log_probs`: one a token."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]


class Sequence:
    """A live sequence: its tokens, and the bundle of the state they left. Made by an engine; released once."""

    def __init__(self, engine: Engine, bundle: Bundle, tenant: str, trajectory: str | None, branch: str) -> None:
        # Its keys (engine/media_memory.py) are what it is made of; its stills may have to be embedded once more.
        self._engine = engine
        self._bundle: Bundle | None = bundle
        self._keys: Keys = np.zeros(0, np.int32)
        self._frames: dict[int, Frame] = {}
        self.tenant, self.trajectory, self.branch = tenant, trajectory, branch
        self.reuse = Reuse()

    @property
    def bundle(self) -> Bundle:
        """Raises ReleasedError after `release`."""
        if self._bundle is None:
            raise ReleasedError(f"this sequence of {self.length} tokens was released; prefill or resume to go on")
        return self._bundle

    @property
    def tokens(self) -> Int32[np.ndarray, " length"]:
        """All tokens processed so far; read-only. Images are there as their placeholders."""
        return self._engine._token_ids(self._keys)

    @property
    def length(self) -> int:
        return self._keys.size

    def logits(self) -> Float[np.ndarray, " vocab"]:
        """Float32 scores of the next token."""
        return self._engine._logits(self)

    def fork(self, branch: str | None = None) -> Sequence:
        """Another sequence with the same past. Moves no state: the first of the two to go on writes elsewhere."""
        return self._engine._fork(self, branch)

    def checkpoint(self, pin: bool = False) -> Mark:
        """Retains the bundle as it is now; with `pin`, until the mark is released."""
        return self._engine._mark(self, pin)

    def release(self) -> None:
        """Lets go of the state. Raises ReleasedError the second time."""
        self._engine._release(self)

    def _append(self, keys: Keys, bundle: Bundle) -> None:
        joined = np.concatenate([self._keys, keys])
        joined.setflags(write=False)
        self._keys, self._bundle = joined, bundle

    def __repr__(self) -> str:
        state = "released" if self._bundle is None else f"slot {self._bundle.slot}, {len(self._bundle.pages)} pages"
        return f"Sequence({self.length} tokens, {state}, trajectory={self.trajectory!r})"


class Mark:
    """A retained bundle. Unpinned, it may be evicted when memory is short; resuming it then raises ReleasedError."""

    def __init__(
        self, engine: Engine, checkpoint: Checkpoint[Bundle], pinned: bool, frames: Mapping[int, Frame]
    ) -> None:
        self._engine = engine
        self._frames = dict(frames)
        self._checkpoint = checkpoint
        self._pinned = pinned

    @property
    def length(self) -> int:
        return self._checkpoint.length

    @property
    def alive(self) -> bool:
        return self._checkpoint.alive

    def release(self) -> None:
        """Takes the pin back: the bundle stays until memory is short. Raises ReleasedError if there is no pin.

        Where the checkpoint was deleted meanwhile there is nothing left to do.
        """
        if not self._pinned:
            raise ReleasedError(f"the checkpoint at token {self.length} holds no pin")
        self._pinned = False
        if self._checkpoint.alive:
            self._engine._unpin(self._checkpoint)
