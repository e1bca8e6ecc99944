"""What every trace format becomes: a trajectory of model calls, first as recorded, then as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

Message = dict[str, Any]
"""An OpenAI-style chat message: role, content, reasoning_content, tool_calls, tool_call_id, name."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One model call of a trajectory, in order of recording.

    `branch` is "main" or the name of a sub-agent. `parent` is the index of the earlier call whose prompt and response
    share the longest opening with this prompt: the call that this one continues or forks from. Of equals it is the
    latest of the same branch, else the first. None means that the context is fresh. It says nothing about who spawned
    whom: a sub-agent that starts from a prompt of its own has no parent.
    """

    branch: str = "main"
    parent: int | None = None
    timestamp_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class MessageCall(Call):
    """A call recorded as chat messages: the prompt, the assistant's message, and the tools offered."""

    messages: tuple[Message, ...]
    response: Message
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class TextCall(Call):
    """A call recorded as flattened text."""

    text: str
    response_text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockCall(Call):
    """A call recorded without text: `blocks[i]` names the content of prompt tokens [i, i + 1) * block_size.

    A name stands for the tokens of its block within the trajectory's `scope`. There are at most
    ceil(input_length / block_size) names; a last one that covers a partly filled block names that part only.
    Lengths are in tokens.
    """

    blocks: Int64[np.ndarray, "blocks"]
    block_size: int
    input_length: int
    output_length: int


@dataclass(frozen=True)
class Trajectory:
    """One recorded agent run. `source` is "file:line" or "file[index]"; block names are compared within `scope`."""

    id: str
    source: str
    format: str
    calls: tuple[Call, ...]
    scope: str = ""


@dataclass(frozen=True, eq=False)
class TokenCall:
    """One call as token ids. `turn_start` is the number of prompt tokens before the generation prompt.

    `message_start` is the number of them before the last message, on the first call of a branch: what its siblings are
    likely to share. It is None on later calls, which continue the branch, and where messages were not recorded.
    The arrays are read-only and may be views of a later call's prompt.
    """

    prompt_ids: Int32[np.ndarray, "prompt"]
    turn_start: int
    response_ids: Int32[np.ndarray, "response"]
    branch: str
    parent: int | None
    timestamp_s: float | None
    message_start: int | None = None


@dataclass(frozen=True, eq=False)
class TokenTrajectory:
    """A trajectory as token ids: all that replay, simulation and report need."""

    id: str
    source: str
    calls: Sequence[TokenCall]
