"""Conversations recorded call by call: the prompt a model would have seen, and the message it answered with."""

import json
from dataclasses import dataclass, field
from typing import Any

from jaxhybrid.demo.workspace import TOOLS, Workspace

Message = dict[str, Any]


@dataclass(frozen=True)
class RecordedCall:
    """`parent` is the index of the call this one continues or forks from; None for a fresh context."""

    branch: str
    parent: int | None
    messages: tuple[Message, ...]
    response: Message


@dataclass
class Recording:
    """The calls of one trajectory in the order they were made, over one workspace."""

    id: str
    workspace: Workspace
    calls: list[RecordedCall] = field(default_factory=list)
    tool_calls: int = 0

    def to_json(self) -> dict[str, Any]:
        """A call's prompt is the first `keep` messages of its parent's prompt and response, and then `append`."""
        return {
            "id": self.id,
            "format": "jaxhybrid.recorded_calls",
            "tools": TOOLS,
            "calls": [self._call_to_json(call) for call in self.calls],
        }

    def _call_to_json(self, call: RecordedCall) -> dict[str, Any]:
        known: list[Message] = []
        if call.parent is not None:
            parent = self.calls[call.parent]
            known = [*parent.messages, parent.response]
        pairs = zip(known, call.messages, strict=False)
        keep = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(known), len(call.messages)))
        return {
            "branch": call.branch,
            "parent": call.parent,
            "keep": keep,
            "append": list(call.messages[keep:]),
            "response": call.response,
        }


@dataclass
class Conversation:
    """One branch of a recording: its messages so far, and the call it last made."""

    recording: Recording
    branch: str
    messages: list[Message]
    last_call: int | None = None

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def use(self, thought: str, *requests: tuple[str, dict[str, Any]], say: str = "") -> list[str]:
        """Answer with tool calls, run them, and append their results; returns the results."""
        self.request(thought, *requests, say=say)
        return [self.result(i, self.recording.workspace.call(name, args)) for i, (name, args) in enumerate(requests)]

    def request(self, thought: str, *requests: tuple[str, dict[str, Any]], say: str = "") -> None:
        """Answer with tool calls whose results are still to come (`result`)."""
        calls = []
        for name, arguments in requests:
            self.recording.tool_calls += 1
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": f"call_{self.recording.tool_calls}", "type": "function", "function": function})
        self._respond({"role": "assistant", "content": say, "reasoning_content": thought, "tool_calls": calls})

    def result(self, index: int, text: str) -> str:
        """Append the result of the `index`-th tool call of the last answer."""
        request = next(m for m in reversed(self.messages) if m["role"] == "assistant")["tool_calls"][index]
        self.messages.append({"role": "tool", "tool_call_id": request["id"], "content": text})
        return text

    def answer(self, thought: str, text: str) -> None:
        self._respond({"role": "assistant", "content": text, "reasoning_content": thought})

    def fork(self, name: str, task: str) -> "Conversation":
        """A sub-agent that sees the prompt of this branch's last call, and then its own task."""
        assert self.last_call is not None, "a fork continues a call"
        prompt = list(self.recording.calls[self.last_call].messages)
        return Conversation(self.recording, name, [*prompt, {"role": "user", "content": task}], self.last_call)

    def shorten_result(self, position: int, note: str) -> None:
        """Context edit: replace the content of the tool message at `position` by a note."""
        assert self.messages[position]["role"] == "tool", "only a tool's result is shortened"
        self.messages[position] = {**self.messages[position], "content": note}

    def ask_again(self, thought: str, text: str) -> None:
        """Send the prompt of the last call once more; the new answer takes the place of the first."""
        assert self.last_call is not None, "there is no question yet"
        self.messages = list(self.recording.calls[self.last_call].messages)
        self.answer(thought, text)

    def _respond(self, response: Message) -> None:
        call = RecordedCall(self.branch, self.last_call, tuple(self.messages), response)
        self.recording.calls.append(call)
        self.last_call = len(self.recording.calls) - 1
        self.messages.append(response)
