"""One request on its way through the engine: tokens to process, then tokens to make."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Int32

from jaxhybrid.engine.sampling import Sampling
from jaxhybrid.engine.sequence import Generation, Sequence
from jaxhybrid.errors import JaxHybridError
from jaxhybrid.state.pool import Bundle

Phase = Literal["waiting", "prefill", "decode", "done"]


@dataclass(eq=False)
class Job:
    """`pending` tokens are processed in chunks that end at `boundaries`, where checkpoints of that kind are kept.

    Then, if `sampling` is given, up to sampling.max_tokens are made; `forced` tokens, if given, are taken as the
    response instead of sampling. `scored` tokens are a response that is processed in chunks once the prompt is in;
    `score` says that this is what is pending now, and the log-probability of each is kept. `fresh`: the sequence was
    made for this job. `looked_up`: its prompt was looked up; what that found stands when it was preempted and comes by
    again. `anchor` is held to go back to: where a sequence stood that the caller already had, or where a response with
    stop strings began.
    """

    sequence: Sequence
    pending: Int32[np.ndarray, " n"]
    sampling: Sampling | None = None
    forced: Int32[np.ndarray, " m"] | None = None
    scored: Int32[np.ndarray, " m"] | None = None
    score: bool = False
    turn_start: int | None = None
    message_start: int | None = None
    boundaries: deque[tuple[int, str]] = field(default_factory=deque)
    phase: Phase = "waiting"
    prompt_length: int = 0
    made: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    error: JaxHybridError | None = None
    fresh: bool = False
    looked_up: bool = False
    opened: bool = False
    anchor: Bundle | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def decodes(self) -> bool:
        return self.sampling is not None and self.finish_reason is None

    @property
    def wanted(self) -> int:
        """Tokens still to be made."""
        if self.forced is not None:
            return self.forced.size - len(self.made)
        return 0 if self.sampling is None else self.sampling.max_tokens - len(self.made)

    @property
    def responds(self) -> bool:
        """Whether what comes after the prompt is a response."""
        return self.sampling is not None or self.scored is not None

    @property
    def generation(self) -> Generation:
        return Generation(tuple(self.made), tuple(self.log_probs), self.finish_reason or "length")
