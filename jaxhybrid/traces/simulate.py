"""Policy study on token ids alone: what each way of keeping checkpoints would have had to compute."""

from __future__ import annotations

import msgspec


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy computed over a set of trajectories. All counts are tokens unless said otherwise."""

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
