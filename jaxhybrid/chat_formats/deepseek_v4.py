"""DeepSeek-V4's chats. The source is the published encoder (deepseek-ai/DeepSeek-V4-Flash, encoding_dsv4.py).

Results of tools are part of the next turn of the user. Reasoning of turns before the last one goes, unless there are
tools: then every turn's is kept, and a conversation only appends.
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

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
REMINDER = "<｜latest_reminder｜>"
CALLS = "tool_calls"
TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
MUCH = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
MORE = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""
FIRST_EFFORTS: Mapping[str | None, str] = {None: "", "high": "", "max": MUCH}
LATER_EFFORTS: Mapping[str | None, str] = {None: "", "low": "", "high": MUCH, "max": MORE}


@dataclass(frozen=True)
class DeepseekV4:
    """The format. Switches, their default first: `thinking` (True, False), `drop_thinking` (True, False),
    `reasoning_effort` (None, and the names in `efforts`).

    A user's message may have a `task`, one of TASKS, whose token takes the place of a usual answer's beginning; an
    assistant's message `wo_eos`, for no end token; system and developer messages a `response_format`.

    efforts: what each `reasoning_effort` puts in front.
    """

    efforts: Mapping[str | None, str]
    marks_controls: ClassVar[bool] = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "DeepseekV4":
        """The format of a checkpoint: those of July 2026 on, which come with a draft model, know more efforts."""
        return cls(LATER_EFFORTS if "dspark_block_size" in config else FIRST_EFFORTS)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        switches: Switches | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as text. Raises TemplateError for one that the format does not have."""
        chosen = chosen_switches(
            switches,
            {"thinking": (True, False), "drop_thinking": (True, False), "reasoning_effort": tuple(self.efforts)},
        )
        thinking = chosen["thinking"]
        turns = _turns(placed_messages(plain_conversation(messages), plain_tools(tools)))
        if add_generation_prompt:
            check_asked(turns)
        drop = thinking and chosen["drop_thinking"] and not any(turn.get("tools") for turn in turns)
        last_user = last_index(turns, ("user", "developer"))
        if drop:
            turns = [turn for i, turn in enumerate(turns) if turn["role"] != "developer" or i >= last_user]
            last_user = last_index(turns, ("user", "developer"))
        parts = [BEGIN, self.efforts[chosen["reasoning_effort"]] if thinking else ""]
        for index, turn in enumerate(turns):
            reasoned = thinking and (not drop or index >= last_user)
            after_task = index > 0 and "task" in turns[index - 1]
            parts += [_turn(turn, reasoned and not after_task), _opening(turns, index, reasoned, thinking)]
        return "".join(parts if add_generation_prompt else parts[:-1])


def _turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Placed messages, each run of users' messages and tools' results made one turn of the user.

    A task ends its turn, also behind results, where the published encoder passes over it.
    """
    turns: list[dict[str, Any]] = []
    order: dict[str, int] = {}
    for message in messages:
        where = message["where"]
        role = check_role(message, where, ROLES)
        if message.get("tool_calls"):
            order = {str(call["id"]): i for i, call in enumerate(message["tool_calls"]) if call.get("id")}
        if role not in ("user", "tool"):
            turns.append(message)
            continue
        joins = turns and turns[-1]["role"] == "user" and (role == "tool" or "task" not in turns[-1])
        if not joins:
            turns.append({"role": "user", "where": where, "blocks": []})
        turn = turns[-1]
        if role == "tool":
            place = order.get(str(message.get("tool_call_id")), 0)
            turn["blocks"].append((place, f"<tool_result>{text_content(message)}</tool_result>"))
        else:
            turn["blocks"].append((None, text_content(message)))
        if "task" in message:
            turn["task"] = message["task"]
    return turns


def _turn(turn: Mapping[str, Any], reasoned: bool) -> str:
    role, where = turn["role"], turn["where"]
    if role == "user":
        # Results in the order of their calls, at the places that results have among the user's messages.
        results = iter(sorted((block for block in turn["blocks"] if block[0] is not None), key=lambda block: block[0]))
        return USER + "\n\n".join((block if block[0] is None else next(results))[1] for block in turn["blocks"])
    content = text_content(turn)
    if role == "system":
        return content + extras(turn, TOOLS)
    if role == "developer":
        if not content:
            raise TemplateError(f"{where}.content: expected what the developer said, got nothing")
        return USER + content + extras(turn, TOOLS)
    if role == "latest_reminder":
        return REMINDER + content
    reasoning = turn.get("reasoning_content", "") + END_THINK if reasoned else ""
    end = "" if turn.get("wo_eos") else END
    return reasoning + content + calls_block(turn, CALLS, raw_arguments=True) + end


def _opening(turns: Sequence[Mapping[str, Any]], index: int, reasoned: bool, thinking: bool) -> str:
    """How the answer to a turn begins, where an answer follows."""
    if index + 1 < len(turns) and turns[index + 1]["role"] not in ("assistant", "latest_reminder"):
        return ""
    turn = turns[index]
    if "task" in turn:
        if turn["task"] not in TASKS:
            raise TemplateError(f"{turn['where']}.task: expected one of {sorted(TASKS)}, got {turn['task']!r}")
        task = f"<｜{turn['task']}｜>"
        return task if turn["task"] != "action" else ASSISTANT + (THINK if thinking else END_THINK) + task
    if turn["role"] not in ("user", "developer"):
        return ""
    return ASSISTANT + (THINK if reasoned else END_THINK)
