"""Kimi K3's chats, "XTML": elements within elements, whose tags stand between control tokens.

    <|open|>message role="user"<|sep|>Hello.<|close|>message<|sep|><|end_of_msg|>

Control tokens come from this structure alone: the same characters in a message are spelt out. An assistant's message is
made of `think`, `response` and `tools`, and reasoning is kept over turns. The source is the format of the published
checkpoint (moonshotai/Kimi-K3, encoding_k3.py).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxhybrid.chat_formats.control_text import control, literal
from jaxhybrid.chat_formats.fields import (
    check_role,
    check_tools,
    chosen_switches,
    content_parts,
    function_of,
    text_field,
    to_json,
)
from jaxhybrid.chat_messages import Message, Switches, Tool, plain_conversation, plain_tools
from jaxhybrid.errors import TemplateError
from jaxhybrid.kimi_patches import image_prompt

END = control("<|end_of_msg|>")
SWITCHES: Mapping[str, Sequence[Any]] = {
    "thinking": (True, False),
    "thinking_effort": ("max", "high", "low", None),
    "tool_choice": (None, "auto", "required", "none"),
    "response_format": (),
}
MEDIA = re.compile(r"(<\|media_\w+\|>)")
ROLES = ("system", "user", "assistant", "tool")
TYPES = {bool: "boolean", type(None): "null", int: "number", float: "number", str: "string", dict: "object"}

EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
ANSWER = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


@dataclass(frozen=True)
class KimiK3:
    """The format. Switches, their default first: `thinking` (True, False); `thinking_effort` ("max", "high", "low",
    None: not said); `tool_choice` (None, "auto", "required", "none"); `response_format`, as in OpenAI's interface.

    An image is a part {"type": "image" or "image_url", "width", "height"}, sides in pixels, and gets one placeholder.
    What the last two switches ask for is said with the generation prompt, so that it stays out of a history.
    """

    marks_controls: ClassVar[bool] = True

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        switches: Switches | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation, control tokens marked. Raises TemplateError, and TokenError for text that is no Unicode."""
        chosen = chosen_switches(switches, SWITCHES)
        thinking = chosen["thinking"]
        parts = []
        declared = plain_tools(tools)
        if declared:
            check_tools(declared)
            parts.append(_instruction("tool-declare", TOOLS.format(_sorted_json(declared))))
        if thinking and chosen["thinking_effort"]:
            parts.append(_instruction("thinking-effort", EFFORT.format(chosen["thinking_effort"])))
        parts += _messages(plain_conversation(messages), thinking)
        if add_generation_prompt:
            if chosen["tool_choice"] in CHOICES:
                parts.append(_instruction("tool-choice", CHOICES[chosen["tool_choice"]]))
            parts.append(_answer_instruction(chosen["response_format"]))
            parts += [_open("message", ("role", "assistant")), _open("think" if thinking else "response")]
        return "".join(parts)


def _open(tag: str, *attributes: tuple[str, str]) -> str:
    parts = [control("<|open|>"), literal(tag)]
    for name, value in attributes:
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        parts += [literal(f" {name}"), literal('="'), literal(escaped), literal('"')]
    return "".join([*parts, control("<|sep|>")])


def _element(tag: str, body: str, *attributes: tuple[str, str]) -> str:
    return "".join([_open(tag, *attributes), body, control("<|close|>"), literal(tag), control("<|sep|>")])


def _instruction(kind: str, text: str) -> str:
    return _element("message", literal(text), ("role", "system"), ("type", kind)) + END


def _answer_instruction(wanted: Any) -> str:
    """What `response_format` asks for, nothing where that is plain text."""
    kind = wanted.get("type") if isinstance(wanted, dict) else "text" if wanted is None else wanted
    if kind == "text":
        return ""
    if kind == "json_object":
        return _instruction("response-format", ANSWER.format(kind))
    schema = wanted.get("json_schema") if isinstance(wanted, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise TemplateError(
            "switches.response_format: expected an object with type text, json_object, or json_schema and its schema, "
            f"got {wanted!r:.80}"
        )
    text = ANSWER.format(kind) + SCHEMA.format(_sorted_json(schema.get("schema", schema)))
    return _instruction("response-format", text)


def _sorted_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _messages(messages: list[dict[str, Any]], thinking: bool) -> Iterator[str]:
    calls: list[dict[str, Any]] = []
    results = 0
    for where, message in _in_call_order(messages):
        role = check_role(message, where, ROLES)
        attributes = [("role", role)]
        name = text_field(message, "name", where)
        if role == "tool":
            results += 1
            attributes += [("tool", _tool_name(message, calls, results, where)), ("index", str(results))]
        elif name:
            attributes.append(("name", name))
        if role == "assistant":
            calls, results = message.get("tool_calls", []), 0
            body = _assistant_body(message, thinking, where)
        elif role == "system" and message.get("tools"):
            check_tools(message["tools"], f"{where}.tools")
            yield _instruction("tool-declare", MORE_TOOLS.format(_sorted_json(message["tools"])))
            continue
        else:
            body = _content(message, where)
        yield _element("message", body, *attributes) + END


def _in_call_order(messages: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, message): results that all answer calls of the message before them by id, in the order of the calls."""
    placed = [(f"messages[{i}]", message) for i, message in enumerate(messages)]
    order: dict[str, tuple[int, str]] = {}
    start = 0
    while start < len(placed):
        where, message = placed[start]
        end = start + 1
        if message["role"] == "tool":
            while end < len(placed) and placed[end][1]["role"] == "tool":
                end += 1
            found = [order.get(str(result.get("tool_call_id", result.get("id")))) for _, result in placed[start:end]]
            known = [place for place in found if place is not None]
            if len(known) == len(found):
                run = sorted(zip(known, placed[start:end], strict=True), key=lambda pair: pair[0][0])
                placed[start:end] = [(place, {**result, "tool": name}) for (_, name), (place, result) in run]
        elif message["role"] == "assistant":
            order = {}
            for number, call in enumerate(message.get("tool_calls", [])):
                if call.get("id") is not None:
                    name = function_of(call, f"{where}.tool_calls[{number}]")["name"]
                    order.setdefault(str(call["id"]), (number, name))
        yield from placed[start:end]
        start = end


def _tool_name(message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], number: int, where: str) -> str:
    """The tool that a result is of: as it says itself, else by its number among the results of the calls before."""
    name = text_field(message, "tool", where) or text_field(message, "name", where)
    if name:
        return name
    if number > len(calls):
        raise TemplateError(f"{where}: expected the name of the tool, or a call before it that this result answers")
    return function_of(calls[number - 1], f"{where}: call {number}")["name"]


def _assistant_body(message: Mapping[str, Any], thinking: bool, where: str) -> str:
    parts = [_element("think", literal(message.get("reasoning_content", "")))] if thinking else []
    parts.append(_element("response", _content(message, where)))
    calls = [
        _call(call, str(number), f"{where}.tool_calls[{number - 1}]")
        for number, call in enumerate(message.get("tool_calls", []), 1)
    ]
    if calls:
        parts.append(_element("tools", "".join(calls)))
    return "".join(parts)


def _content(message: Mapping[str, Any], where: str) -> str:
    parts = []
    for index, part in enumerate(content_parts(message, where)):
        if part["type"] in ("image", "image_url"):
            parts.append(_image(part, f"{where}.content[{index}]"))
        elif part["type"] == "text":
            parts.append(literal(part["text"]))
        else:
            raise TemplateError(f"{where}.content[{index}].type: expected text or image, got {part['type']!r}")
    return "".join(parts)


def _image(part: Mapping[str, Any], where: str) -> str:
    sides = [side for side in (part.get("width"), part.get("height")) if type(side) is int and side > 0]
    if len(sides) < 2:
        raise TemplateError(f"{where}: expected the image's width and height in pixels, got {part!r:.80}")
    width, height = sides
    parts = MEDIA.split(image_prompt(height, width))
    return "".join(control(part) if number % 2 else literal(part) for number, part in enumerate(parts))


def _call(call: Mapping[str, Any], number: str, where: str) -> str:
    function = function_of(call, where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, dict):
        values = [(key, value, value if isinstance(value, str) else to_json(value)) for key, value in arguments.items()]
    elif isinstance(arguments, str):
        found = _read_object(arguments) if arguments else []
        if found is None:
            body = _element("json", literal(arguments), ("type", "object"))
            return _element("call", body, ("tool", function["name"]), ("index", number))
        values = found
    else:
        raise TemplateError(f"{where}: expected arguments as an object or text, got {type(arguments).__name__}")
    body = "".join(
        _element("argument", literal(text), ("key", key), ("type", TYPES.get(type(value), "array")))
        for key, value, text in values
    )
    return _element("call", body, ("tool", function["name"]), ("index", number))


def _read_object(text: str) -> list[tuple[str, Any, str]] | None:
    """(key, value, text of the value) of a JSON object in text, None if it is none.

    A string's text is itself; of other values it is what stands there, so that numbers and spaces stay as they were.
    """
    decoder = json.JSONDecoder(strict=False)

    def skip(at: int) -> int:
        while at < len(text) and text[at] in " \t\n\r":
            at += 1
        return at

    found: list[tuple[str, Any, str]] = []
    at = skip(0)
    if not text.startswith("{", at):
        return None
    at = skip(at + 1)
    if text.startswith("}", at):
        return found
    try:
        while True:
            key, at = decoder.raw_decode(text, at)
            at = skip(at)
            if not isinstance(key, str) or not text.startswith(":", at):
                return None
            start = skip(at + 1)
            value, at = decoder.raw_decode(text, start)
            found.append((key, value, value if isinstance(value, str) else text[start:at]))
            at = skip(at)
            if text.startswith("}", at):
                return found
            if not text.startswith(",", at):
                return None
            at = skip(at + 1)
    except (ValueError, RecursionError):
        return None
