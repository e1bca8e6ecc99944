"""A tokenizer and template small enough to check by eye: one id a byte, `<role>` before each message, `|` after."""

import json
from dataclasses import dataclass

from jaxhybrid.errors import TemplateError


@dataclass(frozen=True)
class Rendered:
    token_ids: list[int]
    turn_start: int
    message_start: int


class ByteTokenizer:
    vocab_size = 256
    end_token_ids = (ord("|"),)

    def encode(self, text):
        return list(text.encode())

    def render(self, messages, tools=None, switches=None):
        if messages[0]["content"] == "refuse":
            raise TemplateError("the template refuses this conversation")
        head = json.dumps(tools) if tools else ""
        drop = (switches or {}).get("drop_reasoning_before_last_user")
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        turns = [
            (f"<{m['role']}>{self._body(m, with_reasoning=not (drop and i < last_user))}|")
            for i, m in enumerate(messages)
        ]
        before, history = (head + "".join(shown) for shown in (turns[:-1], turns))
        return Rendered(self.encode(history + "<assistant>"), len(self.encode(history)), len(self.encode(before)))

    def response_ids(self, messages, response, tools=None, switches=None):
        return self.encode(self._body(response, with_reasoning=True))

    @staticmethod
    def _body(message, *, with_reasoning):
        calls = "".join(f"[{call['function']['name']}]" for call in message.get("tool_calls", ()))
        reasoning = message.get("reasoning_content", "") if with_reasoning else ""
        return reasoning + message["content"] + calls
