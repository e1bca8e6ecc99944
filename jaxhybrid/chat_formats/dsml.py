"""What DeepSeek-V3.2's and V4's chats share: tool calls in DSML, elements whose tags hold the token `｜DSML｜`.

    <｜DSML｜invoke name="search">
    <｜DSML｜parameter name="query" string="true">radix tree</｜DSML｜parameter>
    </｜DSML｜invoke>

Control tokens are where their names stand in the text, as in the published encoders.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxhybrid.chat_formats.fields import check_tools, content_parts, function_of, to_json
from jaxhybrid.errors import TemplateError

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{}"


def placed_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The messages, each with its place under `where`; tools on a system or developer message in front, as both models
    read them. Raises TemplateError for tools that are none."""
    placed = [{**message, "where": f"messages[{i}]"} for i, message in enumerate(messages)]
    if not tools:
        return placed
    check_tools(tools)
    if placed[0]["role"] not in ("system", "developer"):
        placed.insert(0, {"role": "system", "where": "tools"})
    placed[0]["tools"] = tools
    return placed


def check_asked(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises TemplateError where a system message is last: both models begin an answer to what others said only."""
    if messages[-1]["role"] == "system":
        raise TemplateError(f"{messages[-1]['where']}: expected a message to answer, got a system message as the last")


def extras(message: Mapping[str, Any], tools_text: str) -> str:
    """What follows a system or developer message's content: its tools and the form of answer it asks for."""
    parts = []
    if message.get("tools"):
        functions = check_tools(message["tools"], f"{message['where']}.tools")
        parts.append("\n\n" + tools_text.format("\n".join(map(to_json, functions))))
    if message.get("response_format"):
        parts.append("\n\n" + RESPONSE_FORMAT.format(to_json(message["response_format"])))
    return "".join(parts)


def text_content(message: Mapping[str, Any]) -> str:
    """The content's text, parts set apart by an empty line. Raises TemplateError for parts that are no text."""
    parts = content_parts(message, message["where"])
    for index, part in enumerate(parts):
        if part["type"] != "text":
            raise TemplateError(f"{message['where']}.content[{index}].type: expected text, got {part['type']!r}")
    return "\n\n".join(part["text"] for part in parts)


def last_index(messages: Sequence[Mapping[str, Any]], roles: Sequence[str]) -> int:
    """The index of the last message with one of the roles, -1 if there is none."""
    return max((i for i, message in enumerate(messages) if message["role"] in roles), default=-1)


def calls_block(message: Mapping[str, Any], block: str, *, raw_arguments: bool) -> str:
    """A message's tool calls, empty if it has none. `raw_arguments`: text that is no JSON goes in as it is.

    Raises TemplateError for calls without a name, and for arguments that are no JSON object.
    """
    calls = [
        _invoke(call, f"{message['where']}.tool_calls[{number}]", raw_arguments)
        for number, call in enumerate(message.get("tool_calls", []))
    ]
    if not calls:
        return ""
    return "\n".join([f"\n\n<｜DSML｜{block}>", *calls, f"</｜DSML｜{block}>"])


def _invoke(call: Mapping[str, Any], where: str, raw_arguments: bool) -> str:
    function = function_of(call, where)
    parameters = []
    for name, value in _arguments(function.get("arguments", {}), where, raw_arguments).items():
        kind, text = ("true", value) if isinstance(value, str) else ("false", to_json(value))
        parameters.append(f'<｜DSML｜parameter name="{name}" string="{kind}">{text}</｜DSML｜parameter>')
    return f'<｜DSML｜invoke name="{function["name"]}">\n' + "\n".join(parameters) + "\n</｜DSML｜invoke>"


def _arguments(arguments: Any, where: str, raw_arguments: bool) -> dict[str, Any]:
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except ValueError:
            value = {"arguments": arguments} if raw_arguments else arguments
    if not isinstance(value, dict):
        raise TemplateError(f"{where}: expected arguments as a JSON object, got {arguments!r:.80}")
    return value
