"""DeepSeek-V3.2's chats. The source is the published encoder (deepseek-ai/DeepSeek-V3.2, encoding_dsv32.py).

Reasoning after the last message of a user is kept, so that a loop of tool calls only appends. With the next message of
a user it goes, and the turns before begin with `</think>` in place of `<think>`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxhybrid.chat_formats.dsml import (
    ASSISTANT,
    BEGIN,
    END,
    END_THINK,
    THINK,
    USER,
    calls_block,
    check_asked,
    extras,
    last_index,
    placed_messages,
    text_content,
)
from jaxhybrid.chat_formats.fields import check_role, chosen_switches
from jaxhybrid.chat_messages import Message, Switches, Tool, plain_conversation, plain_tools
from jaxhybrid.errors import TemplateError

ROLES = ("system", "developer", "user", "assistant", "tool")
CALLS = "function_calls"
TOOLS = """## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the \
user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<｜DSML｜function_calls>
...
</｜DSML｜function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{}
</functions>
"""


@dataclass(frozen=True)
class DeepseekV32:
    """The format. Switch: `thinking`, True or False. System and developer messages may have a `response_format`.

    Results of tools answer the calls before them in their order. An answer without reasoning is one with none in it.
    """

    marks_controls: ClassVar[bool] = False

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        switches: Switches | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as text. Raises TemplateError for one that the format does not have."""
        thinking = chosen_switches(switches, {"thinking": (True, False)})["thinking"]
        plain = placed_messages(plain_conversation(messages), plain_tools(tools))
        if add_generation_prompt:
            check_asked(plain)
        last_user = last_index(plain, ("user", "developer"))
        parts = [BEGIN]
        for index in range(len(plain)):
            text, opening = _message(plain, index, thinking and index >= last_user)
            parts += [text, opening]
        return "".join(parts if add_generation_prompt else parts[:-1])


def _message(messages: Sequence[Mapping[str, Any]], index: int, thinking: bool) -> tuple[str, str]:
    """A message, and how the answer to it begins, if there will be one. `thinking`: with reasoning."""
    message, where = messages[index], messages[index]["where"]
    role = check_role(message, where, ROLES)
    think = THINK if thinking else END_THINK
    content = text_content(message)
    if role == "system":
        return content + extras(message, TOOLS), ""
    if role == "user":
        return USER + content, ASSISTANT + think
    if role == "developer":
        if not content:
            raise TemplateError(f"{where}.content: expected what the user said, got nothing")
        text = f"{USER}{extras(message, TOOLS)}\n\n# The user's message is: {content}"
        return text, ASSISTANT + think
    if role == "tool":
        return _result(messages, index, content), f"\n\n{think}" if _ends_results(messages, index) else ""
    reasoning = message.get("reasoning_content", "") + END_THINK if thinking else ""
    return reasoning + content + calls_block(message, CALLS, raw_arguments=False) + END, ""


def _result(messages: Sequence[Mapping[str, Any]], index: int, content: str) -> str:
    """A result of a tool, within one element with the others of its run."""
    before = index - 1
    while before >= 0 and messages[before]["role"] == "tool":
        before -= 1
    calls = messages[before].get("tool_calls", [])
    if index - before > len(calls):
        raise TemplateError(
            f"{messages[index]['where']}: expected a result for each tool call before it, got result {index - before} "
            f"for {len(calls)} calls"
        )
    begin = "\n\n<function_results>" if before == index - 1 else ""
    return f"{begin}\n<result>{content}</result>" + ("\n</function_results>" if _ends_results(messages, index) else "")


def _ends_results(messages: Sequence[Mapping[str, Any]], index: int) -> bool:
    return index + 1 == len(messages) or messages[index + 1]["role"] != "tool"
