"""DeepSeek-V4's chats as text."""

import pytest

from jaxhybrid.chat_formats.deepseek_v4 import DeepseekV4
from jaxhybrid.errors import TemplateError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
CHAT = {"thinking": False}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
FIRST, LATER = {"model_type": "deepseek_v4"}, {"model_type": "deepseek_v4", "dspark_block_size": 5}


def text(messages, tools=None, switches=None, add_generation_prompt=True, config=FIRST) -> str:
    return DeepseekV4.of(config).render(messages, tools, switches, add_generation_prompt=add_generation_prompt)


def calling(*calls, **fields) -> dict:
    listed = [{"id": key, "type": "function", "function": {"name": n, "arguments": a}} for key, n, a in calls]
    return {"role": "assistant", "content": "", "tool_calls": listed, **fields}


def user(content: str, **fields) -> dict:
    return {"role": "user", "content": content, **fields}


def tool(key: str, content) -> dict:
    return {"role": "tool", "tool_call_id": key, "content": content}


ANSWER = {"role": "assistant", "content": "4.", "reasoning_content": "2 + 2"}


def test_a_question_with_each_generation_prompt():
    messages = [{"role": "system", "content": "Be {brief}."}, user("Hi")]
    assert text(messages) == f"{BOS}Be {{brief}}.{USER}Hi{ASSISTANT}<think>"
    assert text(messages, switches=CHAT) == f"{BOS}Be {{brief}}.{USER}Hi{ASSISTANT}</think>"
    assert text(messages, add_generation_prompt=False) == f"{BOS}Be {{brief}}.{USER}Hi"


def test_a_new_question_takes_the_reasoning_away_unless_it_is_kept():
    messages = [user("2 + 2?"), ANSWER, user("Sure?")]
    first, later = f"{BOS}{USER}2 + 2?{ASSISTANT}", f"4.{EOS}{USER}Sure?{ASSISTANT}"
    assert text(messages) == f"{first}</think>{later}<think>"
    assert text(messages, switches={"drop_thinking": False}) == f"{first}<think>2 + 2</think>{later}<think>"
    assert text(messages, switches=CHAT) == f"{first}</think>{later}</think>"
    assert text(messages, [ADD]).endswith(f"{USER}2 + 2?{ASSISTANT}<think>2 + 2</think>{later}<think>")
    assert text(messages[:2]) == f"{first}<think>2 + 2</think>4.{EOS}"


CALLS = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">[1, 2]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="note" string="true">é</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="ask">\n'
    '<｜DSML｜parameter name="arguments" string="true">Paris, please</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>"
)


def test_results_are_a_turn_of_the_user_in_the_order_of_the_calls():
    calls = calling(("x", "add", '{"a": [1, 2], "note": "é"}'), ("y", "ask", "Paris, please"), reasoning_content="Add.")
    loop = [user("Hi"), calls, tool("y", "two"), tool("x", "one"), user("And?")]
    shown = text(loop, [ADD])
    assert shown.endswith(
        f"{USER}Hi{ASSISTANT}<think>Add.</think>{CALLS}{EOS}{USER}<tool_result>one</tool_result>\n\n"
        f"<tool_result>two</tool_result>\n\nAnd?{ASSISTANT}<think>"
    )


def test_results_with_parts_and_users_messages_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [user("One"), user("Two"), calling(("x", "f", {})), tool("x", parts)]
    shown = text(messages, switches=CHAT)
    assert shown.startswith(f"{BOS}{USER}One\n\nTwo{ASSISTANT}</think>")
    assert shown.endswith(f"{EOS}{USER}<tool_result>a\n\nb</tool_result>{ASSISTANT}</think>")


def test_tools_follow_the_system_message_or_stand_alone():
    declared = text([{"role": "system", "content": "Be brief."}, user("Hi")], [ADD])
    assert declared.startswith(f"{BOS}Be brief.\n\n## Tools\n\nYou have access to a set of tools to help answer the us")
    assert '"<｜DSML｜tool_calls>" block like the following:\n\n<｜DSML｜tool_calls>\n' in declared
    assert declared.endswith(
        '### Available Tool Schemas\n\n{"name": "add", "parameters": {"type": "object", "properties": {}}}\n\nYou MUST '
        f"strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n{USER}Hi{ASSISTANT}"
        "<think>"
    )
    assert text([user("Hi")], [ADD]) == declared.replace("Be brief.", "")


def test_efforts_are_those_of_the_checkpoint():
    begin = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very thorough in your"
    beyond = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\nYou MUST reason with"
    asked = [user("Hi")]

    def front(effort: str | None, config: dict) -> str:
        shown = text(asked, switches={"reasoning_effort": effort}, config=config)
        assert shown.endswith(f"{USER}Hi{ASSISTANT}<think>")
        return shown.removeprefix(BOS).partition(USER)[0]

    assert front(None, FIRST) == front("high", FIRST) == front(None, LATER) == front("low", LATER) == ""
    assert front("max", FIRST) == front("high", LATER)
    assert front("max", FIRST).startswith(begin)
    assert front("max", FIRST).endswith("rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n")
    assert front("max", LATER).startswith(beyond)
    assert front("max", LATER).endswith("no assumption remains unchecked and no error remains undiscovered.\n\n")
    assert text(asked, switches={"reasoning_effort": "max", **CHAT}) == f"{BOS}{USER}Hi{ASSISTANT}</think>"


def test_developers_and_reminders():
    messages = [
        {"role": "developer", "content": "Search.", "response_format": {"type": "object"}},
        {"role": "latest_reminder", "content": "Today is Monday."},
        user("Hi"),
    ]
    kept = text(messages, switches={"drop_thinking": False})
    assert kept == (
        f"{BOS}{USER}Search.\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        f'{{"type": "object"}}{ASSISTANT}<think><｜latest_reminder｜>Today is Monday.{USER}Hi{ASSISTANT}<think>'
    )
    assert text(messages) == f"{BOS}<｜latest_reminder｜>Today is Monday.{USER}Hi{ASSISTANT}<think>"


@pytest.mark.parametrize(
    ("task", "opening"),
    [("title", "<｜title｜>"), ("read_url", "<｜read_url｜>"), ("action", f"{ASSISTANT}<think><｜action｜>")],
)
def test_a_task_takes_the_place_of_an_answer(task, opening):
    asked = [user("Before", task="domain"), user("Hi", task=task)]
    assert text(asked[1:]) == f"{BOS}{USER}Hi{opening}"
    assert text(asked[1:], add_generation_prompt=False) == f"{BOS}{USER}Hi"
    answered = [*asked[1:], {"role": "assistant", "content": "Greeting", "reasoning_content": "no", "wo_eos": True}]
    assert text(answered) == f"{BOS}{USER}Hi{opening}Greeting"
    assert text(asked) == f"{BOS}{USER}Before{USER}Hi{opening}"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "function"}], r"messages\[0\]\.role: expected one of \['assistant', .*\], got 'function'"),
        ([{"role": "developer"}], r"messages\[0\]\.content: expected what the developer said, got nothing"),
        ([user("Hi", task="sing")], r"messages\[0\]\.task: expected one of \['action', .*\], got 'sing'"),
        (
            [user("Hi"), calling(("x", "f", [1]))],
            r"\[1\]\.tool_calls\[0\]: expected arguments as a JSON object",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], r"content\[0\]\.type: expected text, got 'image'"),
        (
            [calling(("x", "f", {})), tool("x", [{"type": "image"}])],
            r"messages\[1\]\.content\[0\]\.type: expected text, got 'image'",
        ),
        ([{**ANSWER, "reasoning_content": 7}], r"messages\[0\]\.reasoning_content: expected text, got int"),
    ],
)
def test_invalid_messages(messages, message):
    with pytest.raises(TemplateError, match=message):
        text(messages)


def test_invalid_tools_and_switches():
    with pytest.raises(TemplateError, match=r"tools\[0\]: expected a function with its name"):
        text([user("Hi")], [{"type": "web_search"}])
    with pytest.raises(TemplateError, match=r"reasoning_effort: expected one of \[None, 'high', 'max'\], got 'low'"):
        text([user("Hi")], switches={"reasoning_effort": "low"})
    with pytest.raises(TemplateError, match=r"some of \['drop_thinking', 'reasoning_effort', 'thinking'\], got 'mode'"):
        text([user("Hi")], switches={"mode": "chat"})
