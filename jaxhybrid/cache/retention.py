"""Which boundaries of a request are worth a checkpoint: the policy, apart from where checkpoints are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxhybrid.errors import ConfigError

Kind = Literal["turn_start", "message_start", "junction", "prompt_end", "response_end", "every"]


@dataclass(frozen=True)
class Retention:
    """Where checkpoints are kept.

    prompt_end: after the whole prompt, where sampling starts: forks and retries of the same prompt resume here.
    response_end: after the response, before its end token: the next call of a growing conversation resumes here.
    turn_start: after the last user or tool message, before the generation prompt: where the next call resumes when the
        template rewrites the assistant's turn.
    message_start: before the last message of a branch's first call: where siblings resume that share a beginning, such
        as the system prompt and tools or a forked context, and differ in their task.
    junctions: where a request left a known path: whatever the two have in common, a third is likely to share.
    every: at multiples of this many tokens, in prompts and responses; None for no grid.
    """

    prompt_end: bool = True
    response_end: bool = True
    turn_start: bool = True
    message_start: bool = True
    junctions: bool = True
    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(f"every must be at least 1 token or None, got {self.every}")


def boundaries(
    retention: Retention,
    *,
    length: int,
    resumed: int,
    matched: int,
    left_known_path: bool,
    turn_start: int | None = None,
    message_start: int | None = None,
) -> list[tuple[int, Kind]]:
    """The boundaries at which a prompt's prefill should stop and keep a checkpoint.

    length: tokens in the prompt. resumed: boundary that prefill starts from, which has a checkpoint or is 0.
    matched, left_known_path: as reported by the index's `Match` *before* this prompt was inserted.
    turn_start: tokens before the generation prompt; None where that is not known.
    message_start: tokens before the last message; None where that is not known, and on later calls of a branch, which
        continue it: there a checkpoint would serve no one.

    Returns (boundary, kind) pairs, ascending, each boundary once (its kind the first of `Kind` that asks for it), with
    resumed < boundary <= length. What lies beyond the prompt is the matter of `response_boundaries`.
    """
    wanted: list[tuple[int, Kind]] = []
    if retention.turn_start and turn_start is not None:
        wanted.append((turn_start, "turn_start"))
    if retention.message_start and message_start is not None:
        wanted.append((message_start, "message_start"))
    if retention.junctions and left_known_path:
        wanted.append((matched, "junction"))
    if retention.prompt_end:
        wanted.append((length, "prompt_end"))
    wanted.extend((n, "every") for n in _grid(retention, resumed, length))
    kinds: dict[int, Kind] = {}
    for n, kind in wanted:
        if resumed < n <= length:
            kinds.setdefault(n, kind)
    return sorted(kinds.items())


def response_boundaries(retention: Retention, *, prompt_length: int, length: int) -> list[tuple[int, Kind]]:
    """The boundaries at which a response, tokens [prompt_length, length) of its sequence, is worth a checkpoint.

    `length` excludes an end token. The rest as for `boundaries`, with prompt_length < boundary <= length.
    """
    kinds: dict[int, Kind] = dict.fromkeys(_grid(retention, prompt_length, length), "every")
    if retention.response_end and length > prompt_length:
        kinds[length] = "response_end"
    return sorted(kinds.items())


def _grid(retention: Retention, after: int, last: int) -> range:
    """The multiples of `every` in (after, last]."""
    if retention.every is None:
        return range(0)
    return range((after // retention.every + 1) * retention.every, last + 1, retention.every)
