"""Chat formats of families whose checkpoints publish code in place of a template."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from jaxhybrid.chat_formats.deepseek_v4 import DeepseekV4
from jaxhybrid.chat_formats.deepseek_v32 import DeepseekV32
from jaxhybrid.chat_formats.kimi_k3 import KimiK3
from jaxhybrid.chat_messages import Message, Switches, Tool
from jaxhybrid.errors import TemplateError


class ChatFormat(Protocol):
    """What turns conversations into text: one of these formats, or a `ChatTemplate`."""

    marks_controls: ClassVar[bool]
    """Control tokens are marked, as in `control_text`. If not, they are where their names stand in the text."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        switches: Switches | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as text. Raises TemplateError for a conversation that the format does not have."""
        ...


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], ChatFormat]] = {
    "kimi_k3": lambda config: KimiK3(),
    "deepseek_v32": lambda config: DeepseekV32(),
    "deepseek_v4": DeepseekV4.of,
}


def format_of(config: Mapping[str, Any]) -> ChatFormat | None:
    """The format of a checkpoint by the `model_type` of its config.json; None if its chats need a template.

    Raises TemplateError for a `model_type` that is no text.
    """
    model_type = config.get("model_type", "")
    if not isinstance(model_type, str):
        raise TemplateError(f"model_type: expected text, got {model_type!r:.80}")
    make = FORMATS.get(model_type)
    return None if make is None else make(config)
