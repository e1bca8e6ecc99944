"""What is no conversation in any format that has no template."""

import pytest

from jaxhybrid.chat_formats import format_of
from jaxhybrid.errors import TemplateError

FORMATS = ("kimi_k3", "deepseek_v32", "deepseek_v4")
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
CALLED = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALLED]}
ANSWER = {"role": "assistant", "content": "Hello."}
RESULT = {"role": "tool", "name": "add", "content": "3"}


def rendered(name: str, messages: list, switches=None, add_generation_prompt: bool = True) -> str:
    chat_format = format_of({"model_type": name})
    assert chat_format is not None
    return chat_format.render(messages, None, switches, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("messages", "place"), [([RESULT], 0), ([USER, RESULT], 1), ([USER, CALLING, RESULT, ANSWER, RESULT], 4)]
)
def test_a_result_answers_a_call(name, messages, place):
    with pytest.raises(TemplateError, match=rf"messages\[{place}\]: expected a tool's result to answer a call"):
        rendered(name, messages)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_text(name, key):
    """Also where it isn't shown: before the last question, and without thinking."""
    messages = [USER, {**ANSWER, key: 5}, USER]
    for switches in ({}, {"thinking": False}):
        with pytest.raises(TemplateError, match=rf"messages\[1\]\.{key}: expected text, got int"):
            rendered(name, messages, switches)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_a_system_message_has_no_answer(name):
    """The published encoders begin none there."""
    for messages in ([SYSTEM], [USER, ANSWER, SYSTEM]):
        where = rf"messages\[{len(messages) - 1}\]"
        with pytest.raises(TemplateError, match=f"{where}: expected a message to answer, got a system message"):
            rendered(name, messages)
        assert rendered(name, messages, add_generation_prompt=False).endswith("Be brief.")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("switches", [5, 0, "x", ["thinking"]])
def test_switches_are_an_object(name, switches):
    kind = type(switches).__name__
    with pytest.raises(TemplateError, match=f"switches: expected an object, got {kind}"):
        rendered(name, [USER], switches)


def test_a_model_type_is_text():
    with pytest.raises(TemplateError, match=r"model_type: expected text, got \['kimi_k3'\]"):
        format_of({"model_type": ["kimi_k3"]})
