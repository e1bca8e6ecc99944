"""Every counter of an engine, typed."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class TokenCounters:
    """Tokens of prompts by what became of them, and tokens made. Kept for the engine and for every trajectory.

    prompt = reused + gap + new: reused from a bundle, known but computed again, never seen before.
    """

    calls: int = 0
    prompt: int = 0
    reused: int = 0
    gap: int = 0
    new: int = 0
    generated: int = 0
    limited_by: dict[str, int] = field(default_factory=dict)


@dataclass
class EventCounters:
    """Events since the engine was made."""

    restores: int = 0
    forks: int = 0
    evictions: int = 0
    preemptions: int = 0
    refusals: int = 0
    prefill_dispatches: int = 0
    decode_dispatches: int = 0
    checkpoints: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Bytes are of device memory; `live_bytes` by kind of state (recurrent, conv, latent, kv, logits)."""

    tokens: TokenCounters
    events: EventCounters
    by_trajectory: Mapping[str, TokenCounters]
    compiled_programs: int
    recurrent_bytes_copied: int
    kv_bytes_copied: int
    state_moves: int
    live_sequences: int
    retained_checkpoints: int
    live_slots: int
    free_slots: int
    live_pages: int
    free_pages: int
    live_bytes: Mapping[str, int]
    kernel_fallbacks: Mapping[str, int]
