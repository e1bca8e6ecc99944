"""DeepSeek-V3.2's chats as text."""

import pytest

from jaxhybrid.chat_formats.deepseek_v32 import DeepseekV32
from jaxhybrid.errors import TemplateError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
CHAT = {"thinking": False}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def text(messages, tools=None, switches=None, add_generation_prompt=True) -> str:
    return DeepseekV32().render(messages, tools, switches, add_generation_prompt=add_generation_prompt)


def calling(*calls, **fields) -> dict:
    listed = [{"id": key, "type": "function", "function": {"name": n, "arguments": a}} for key, n, a in calls]
    return {"role": "assistant", "content": "", "tool_calls": listed, **fields}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def tool(content: str) -> dict:
    return {"role": "tool", "tool_call_id": "any", "content": content}


def test_a_question_with_each_generation_prompt():
    messages = [{"role": "system", "content": "Be {brief}."}, user("Hi")]
    assert text(messages) == f"{BOS}Be {{brief}}.{USER}Hi{ASSISTANT}<think>"
    assert text(messages, switches=CHAT) == f"{BOS}Be {{brief}}.{USER}Hi{ASSISTANT}</think>"
    assert text(messages, add_generation_prompt=False) == f"{BOS}Be {{brief}}.{USER}Hi"


def test_a_new_question_takes_the_reasoning_before_it_away():
    answer = {"role": "assistant", "content": "4.", "reasoning_content": "2 + 2"}
    first = f"{BOS}{USER}2 + 2?{ASSISTANT}"
    assert text([user("2 + 2?"), answer], add_generation_prompt=False) == f"{first}<think>2 + 2</think>4.{EOS}"
    later = f"{USER}Sure?{ASSISTANT}"
    assert text([user("2 + 2?"), answer, user("Sure?")]) == f"{first}</think>4.{EOS}{later}<think>"
    assert text([user("2 + 2?"), answer, user("Sure?")], switches=CHAT) == f"{first}</think>4.{EOS}{later}</think>"


def test_an_answer_without_reasoning_closes_the_thinking_at_once():
    messages = [user("Hi"), {"role": "assistant", "content": "Hello."}]
    assert text(messages) == f"{BOS}{USER}Hi{ASSISTANT}<think></think>Hello.{EOS}"


CALLS = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">[1, 2]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="note" string="true">"é" & <b></｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="stop">\n\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)


@pytest.mark.parametrize("arguments", ['{"a":[1,2],"note":"\\"é\\" & <b>"}', {"a": [1, 2], "note": '"é" & <b>'}])
def test_calls_and_their_results(arguments):
    calls = calling(("x", "add", arguments), ("y", "stop", "{}"), reasoning_content="Add.")
    loop = [user("Hi"), calls, tool("3"), tool("")]
    begun = f"{BOS}{USER}Hi{ASSISTANT}<think>Add.</think>{CALLS}{EOS}"
    results = "\n\n<function_results>\n<result>3</result>\n<result></result>\n</function_results>"
    assert text(loop) == f"{begun}{results}\n\n<think>"
    assert text(loop, switches=CHAT) == f"{BOS}{USER}Hi{ASSISTANT}</think>{CALLS}{EOS}{results}\n\n</think>"
    assert text(loop, add_generation_prompt=False) == begun + results
    assert text([*loop, {"role": "assistant", "content": "3.", "reasoning_content": "So."}]) == (
        f"{begun}{results}\n\n<think>So.</think>3.{EOS}"
    )


def test_tools_follow_the_system_message_or_stand_alone():
    declared = text([{"role": "system", "content": "Be brief."}, user("Hi")], [ADD])
    assert declared.startswith(f"{BOS}Be brief.\n\n## Tools\nYou have access to a set of tools you can use to answer ")
    assert '\n<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜par' in declared
    assert declared.endswith(
        "<think>...thinking about results</think>\nHere are the functions available in JSONSchema format:\n<functions>"
        '\n{"name": "add", "parameters": {"type": "object", "properties": {}}}\n</functions>\n'
        f"{USER}Hi{ASSISTANT}<think>"
    )
    assert text([user("Hi")], [ADD]) == declared.replace("Be brief.", "")
    assert text([user("Hi")], []) == f"{BOS}{USER}Hi{ASSISTANT}<think>"


def test_a_developers_message_says_whose_it_is_and_what_to_answer_with():
    messages = [{"role": "developer", "content": "Search.", "response_format": {"type": "object"}}]
    assert text(messages) == (
        f"{BOS}{USER}\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        f'{{"type": "object"}}\n\n# The user\'s message is: Search.{ASSISTANT}<think>'
    )


def test_parts_of_text_are_set_apart():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text([{"role": "user", "content": parts}]) == f"{BOS}{USER}a\n\nb{ASSISTANT}<think>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [{"role": "latest_reminder", "content": "x"}],
            r"messages\[0\]\.role: expected one of \['assistant', 'developer', 'system', 'tool', 'user'\]",
        ),
        ([{"role": "developer"}], r"messages\[0\]\.content: expected what the user said, got nothing"),
        (
            [calling(("x", "f", {})), tool("3"), user("Hi"), tool("4")],
            r"messages\[3\]: expected a result for each tool call .*, got result 1 for 0 calls",
        ),
        (
            [calling(("x", "f", {})), tool("3"), tool("4")],
            r"messages\[2\]: expected a result for each tool call before it, got result 2 for 1 calls",
        ),
        ([calling(("x", "f", "Paris"))], r"tool_calls\[0\]: expected arguments as a JSON object, got 'Paris'"),
        ([calling(("x", "f", "[1]"))], r"tool_calls\[0\]: expected arguments as a JSON object, got '\[1\]'"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"content\[0\]\.type: expected text, got 'image'"),
    ],
)
def test_invalid_messages(messages, message):
    with pytest.raises(TemplateError, match=message):
        text(messages)


def test_invalid_tools_and_switches():
    with pytest.raises(TemplateError, match=r"tools\[0\]: expected parameters as a JSON schema, got \[\]"):
        text([user("Hi")], [{"function": {"name": "f", "parameters": []}}])
    with pytest.raises(TemplateError, match=r"messages\[0\]\.tools: expected a list of tools, got 'all'"):
        text([{"role": "system", "tools": "all"}, user("Hi")])
    with pytest.raises(TemplateError, match=r"switches: expected some of \['thinking'\], got 'reasoning_effort'"):
        text([user("Hi")], switches={"reasoning_effort": "max"})
    with pytest.raises(TemplateError, match=r"switches\.thinking: expected one of \[True, False\], got None"):
        text([user("Hi")], switches={"thinking": None})
