"""Conversations as every chat format takes them: OpenAI-style messages, tools and switches, checked and made plain."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxhybrid.errors import TemplateError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
Switches = Mapping[str, Any]

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as JSON data: keys without a value left out, reasoning under each of the names it goes by.

    Raises TemplateError, with the place, for what is not a list of OpenAI-style messages, and for none at all.
    """
    plain = [_plain_message(message, f"messages[{i}]") for i, message in enumerate(_sequence(messages, "messages"))]
    if not plain:
        raise TemplateError("messages: expected at least one message, got none")
    return plain


def plain_conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as `plain_messages` has them, for a format that no template checks.

    Raises TemplateError, with the place, also for a tool's result where the last assistant's message called nothing.
    """
    plain = plain_messages(messages)
    calls: Sequence[Any] = ()
    for index, message in enumerate(plain):
        if message["role"] == "assistant":
            calls = message.get("tool_calls", ())
        if message["role"] == "tool" and not calls:
            raise TemplateError(
                f"messages[{index}]: expected a tool's result to answer a call of the assistant's message before it, "
                "which has none"
            )
    return plain


def check_response(response: Message) -> None:
    """Raises TemplateError for what is no assistant's message."""
    if not isinstance(response, Mapping) or response.get("role") != "assistant":
        raise TemplateError(f"response: expected an assistant's message, got {response!r:.80}")


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools as JSON data. Raises TemplateError, with the place, for what is not a list of objects."""
    return None if tools is None else [_plain_tool(tool, i) for i, tool in enumerate(_sequence(tools, "tools"))]


def plain_switches(switches: Switches | None) -> dict[str, Any]:
    """The switches as JSON data. Raises TemplateError for what is no object, and for a name not theirs to set."""
    if switches is None:
        return {}
    if not isinstance(switches, Mapping):
        raise TemplateError(f"switches: expected an object, got {type(switches).__name__}")
    for name in switches:
        if name in RESERVED:
            raise TemplateError(f"switches: {name!r} is set by the renderer and cannot be a switch")
    return _plain(switches, "switches")


def _sequence(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TemplateError(f"{where}: expected a list, got {type(value).__name__}")
    return value


def _plain_message(message: Any, where: str) -> dict[str, Any]:
    """As the reference does: keys without a value are left out, and reasoning is found under each of its names."""
    if not isinstance(message, Mapping):
        raise TemplateError(f"{where}: expected an object, got {type(message).__name__}")
    plain = {key: value for key, value in _plain(message, where).items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise TemplateError(f"{where}.role: expected text, got {message.get('role')!r}")
    if not isinstance(plain.get("content", ""), str | list):
        raise TemplateError(f"{where}.content: expected text or a list of parts, got {type(plain['content']).__name__}")
    for index, call in enumerate(_sequence(plain.get("tool_calls", []), f"{where}.tool_calls")):
        if not isinstance(call, dict):
            raise TemplateError(f"{where}.tool_calls[{index}]: expected an object, got {type(call).__name__}")
    named = next((key for key in REASONING_KEYS if key in plain), None)
    if named is not None:
        reasoning = plain[named]
        if not isinstance(reasoning, str):
            raise TemplateError(f"{where}.{named}: expected text, got {type(reasoning).__name__}")
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain_tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise TemplateError(f"tools[{index}]: expected an object, got {type(tool).__name__}")
    return _plain(tool, f"tools[{index}]")


def _plain(value: Any, where: str) -> Any:
    """JSON data only: an object with methods would be a way out of a template's sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise TemplateError(f"{where}: expected JSON data, got {type(value).__name__}")


def _key(key: Any, where: str) -> str:
    if type(key) is not str:
        raise TemplateError(f"{where}: expected text as keys, got {key!r}")
    return key
