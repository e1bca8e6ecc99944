"""What the formats ask of messages, tools and switches, with errors that name the place."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxhybrid.chat_messages import Switches, plain_switches
from jaxhybrid.errors import TemplateError


def chosen_switches(switches: Switches | None, allowed: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Each allowed switch's value: the given one, or the first of those allowed; of an empty list, any or None.

    Raises TemplateError for a switch that the format does not have, and for another value.
    """
    given = plain_switches(switches)
    for name, value in given.items():
        if name not in allowed:
            raise TemplateError(f"switches: expected some of {sorted(allowed)}, got {name!r}")
        values = allowed[name]
        if values and not any(type(value) is type(choice) and value == choice for choice in values):
            raise TemplateError(f"switches.{name}: expected one of {list(values)}, got {value!r}")
    return {name: given.get(name, values[0] if values else None) for name, values in allowed.items()}


def check_role(message: Mapping[str, Any], where: str, roles: Sequence[str]) -> str:
    """The message's role. Raises TemplateError if it is none of `roles`."""
    if message["role"] not in roles:
        raise TemplateError(f"{where}.role: expected one of {sorted(roles)}, got {message['role']!r}")
    return message["role"]


def text_field(message: Mapping[str, Any], name: str, where: str) -> str:
    """A field of text, empty where it is left out. Raises TemplateError for anything else."""
    value = message.get(name)
    if not isinstance(value, str | None):
        raise TemplateError(f"{where}.{name}: expected text, got {type(value).__name__}")
    return value or ""


def content_parts(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The content as parts, each an object with its type, those of type text with their text."""
    content = message.get("content", "")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise TemplateError(f"{place}: expected an object with its type, got {part!r:.80}")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise TemplateError(f"{place}.text: expected text, got {type(part.get('text')).__name__}")
    return content


def function_of(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The function of a tool or tool call, with its name. Raises TemplateError where there is none."""
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TemplateError(f"{where}: expected a function with its name, got {value!r:.80}")
    return function


def check_tools(tools: Sequence[Mapping[str, Any]], where: str = "tools") -> list[dict[str, Any]]:
    """The functions of the tools. Raises TemplateError for a tool whose parameters are no JSON schema."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise TemplateError(f"{where}: expected a list of tools, got {tools!r:.80}")
    functions = [function_of(tool, f"{where}[{i}]") for i, tool in enumerate(tools)]
    for index, function in enumerate(functions):
        schema = function.get("parameters")
        if not isinstance(schema, dict | None):
            raise TemplateError(f"{where}[{index}]: expected parameters as a JSON schema, got {schema!r:.80}")
    return functions


def to_json(value: Any) -> str:
    """JSON with spaces after its separators, and characters as they are."""
    return json.dumps(value, ensure_ascii=False)
