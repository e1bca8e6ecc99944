"""Trajectories turned into token ids: by a model's tokenizer and chat template, or from block hashes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from jaxhybrid.errors import TemplateError, TokenError, TraceError
from jaxhybrid.traces.block_tokens import TokenSource, block_token_ids
from jaxhybrid.traces.trajectory import (
    BlockCall,
    Call,
    Message,
    MessageCall,
    TextCall,
    TokenCall,
    TokenTrajectory,
    Trajectory,
)


class Prompt(Protocol):
    """A rendered prompt: its ids, and the number of them before the generation prompt and before the last message."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def turn_start(self) -> int: ...

    @property
    def message_start(self) -> int: ...


class Tokenizer(Protocol):
    """What tokenising needs of a `jaxhybrid.chat.ChatTokenizer`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]: ...

    def render(self, messages: Any, tools: Any = None, switches: Any = None) -> Prompt: ...

    def response_ids(self, messages: Any, response: Message, tools: Any = None, switches: Any = None) -> list[int]: ...


@dataclass(frozen=True)
class _Rendered:
    prompt: Int32[np.ndarray, "prompt"]
    turn_start: int
    response: Int32[np.ndarray, "response"]
    message_start: int | None = None


def tokenise(
    trajectory: Trajectory,
    tokenizer: Tokenizer,
    switches: Mapping[str, Any] | None = None,
    *,
    first_id: int = 0,
    seed: int = 0,
) -> TokenTrajectory:
    """The trajectory's calls as token ids.

    Messages go through the chat template, with `switches` for it, each call's prompt on its own. Text is encoded as it
    is, and its turn starts at its end. Block hashes become ids in [first_id, vocab_size), never an end token, that
    depend on `seed`, the trajectory's scope and the hash alone; their turns start at the prompt's end too.

    Prompts that a later call extends are views of its array. Raises TraceError, with the place, for a conversation that
    the template refuses, text that is none, and a prompt that comes to no tokens at all.
    """
    calls = trajectory.calls
    blocks = [call for call in calls if isinstance(call, BlockCall)]
    if blocks:
        source = TokenSource(trajectory.scope, first_id, tokenizer.vocab_size, tuple(tokenizer.end_token_ids), seed)
        rendered = [
            _Rendered(prompt, len(prompt), ids) for prompt, ids in block_token_ids(blocks, source, trajectory.id)
        ]
    else:
        rendered = _render_all(trajectory, tokenizer, switches)
    return TokenTrajectory(
        trajectory.id,
        trajectory.source,
        tuple(
            TokenCall(
                r.prompt, r.turn_start, r.response, call.branch, call.parent, call.timestamp_s,
                r.message_start if first else None,
            )
            for call, r, first in zip(calls, rendered, _first_of_branch(calls), strict=True)
        ),
    )  # fmt: skip


def _first_of_branch(calls: Sequence[Call]) -> list[bool]:
    """For each call, whether it begins its branch."""
    first: dict[str, int] = {}
    return [first.setdefault(call.branch, number) == number for number, call in enumerate(calls)]


def _render_all(trajectory: Trajectory, tokenizer: Tokenizer, switches: Mapping[str, Any] | None) -> list[_Rendered]:
    """Each call rendered, keeping one array for each line of prompts that extend each other."""
    rendered: list[_Rendered] = []
    lengths: list[int] = []
    extension: list[int | None] = []
    for index, call in enumerate(trajectory.calls):
        try:
            new = _render(call, tokenizer, switches)
        except (TemplateError, TokenError) as error:
            raise TraceError(f"{trajectory.source}: call {index}: {error}") from error
        if len(new.prompt) == 0:
            raise TraceError(f"{trajectory.source}: call {index}: expected a prompt, got no tokens")
        rendered.append(new)
        lengths.append(len(new.prompt))
        extension.append(None)
        parent = call.parent
        if parent is not None and extension[parent] is None:
            earlier = rendered[parent].prompt
            if np.array_equal(new.prompt[: len(earlier)], earlier):
                extension[parent] = index
                rendered[parent] = replace(rendered[parent], prompt=_array([]))
    for index in reversed(range(len(rendered))):
        later = extension[index]
        if later is not None:
            rendered[index] = replace(rendered[index], prompt=rendered[later].prompt[: lengths[index]])
    return rendered


def _render(call: Call, tokenizer: Tokenizer, switches: Mapping[str, Any] | None) -> _Rendered:
    if isinstance(call, TextCall):
        prompt = _array(tokenizer.encode(call.text))
        return _Rendered(prompt, len(prompt), _array(tokenizer.encode(call.response_text)))
    assert isinstance(call, MessageCall)
    messages, tools = list(call.messages), list(call.tools) if call.tools else None
    shown = tokenizer.render(messages, tools, switches)
    response = tokenizer.response_ids(messages, call.response, tools, switches)
    return _Rendered(_array(shown.token_ids), shown.turn_start, _array(response), shown.message_start)


def _array(ids: Sequence[int]) -> Int32[np.ndarray, "n"]:
    array = np.array(ids, dtype=np.int32)
    array.flags.writeable = False
    return array
