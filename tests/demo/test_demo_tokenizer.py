"""The demo model's tokenizer and chat template."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxhybrid.demo
from jaxhybrid.chat import ChatTokenizer
from jaxhybrid.demo.architecture import CONFIG
from jaxhybrid.demo.tokenizer import SPECIAL_TOKENS
from jaxhybrid.demo.workspace import TOOLS
from jaxhybrid.errors import TemplateError

TOKENIZER = ChatTokenizer.from_folder(Path(jaxhybrid.demo.__file__).parent)
KEEP = {"preserve_thinking": True}


def request(number: int, arguments: str, thought: str = "look") -> dict:
    function = {"name": "grep", "arguments": arguments}
    calls = [{"id": f"c{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": calls}


SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "where is x?"}
LOOK = request(1, '{"pattern": "x", "path": "."}')
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "\n    a.py:3: x = 1\n"}
ANSWER = {"role": "assistant", "content": "in a.py", "reasoning_content": "found it"}
NEXT = {"role": "user", "content": "and y?"}


@given(st.text())
def test_any_text_survives_a_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.binary(max_size=64))
def test_any_bytes_survive_as_text(data):
    text = data.decode("latin-1")
    assert TOKENIZER.decode(TOKENIZER.encode(text)).encode("latin-1") == data


def test_vocabulary_matches_the_model_and_special_tokens_come_first():
    assert TOKENIZER.vocab_size == CONFIG["vocab_size"] == 4096
    for number, token in enumerate(SPECIAL_TOKENS):
        assert TOKENIZER.encode(token) == [number]
    assert TOKENIZER.end_token_ids == (CONFIG["eos_token_id"],) == (TOKENIZER.encode("<|im_end|>")[0],)


def test_a_line_of_python_starts_with_one_token():
    assert len(TOKENIZER.encode("\n        return")) == 2


@pytest.mark.parametrize("response", [LOOK, ANSWER], ids=["tool call", "answer"])
def test_the_tool_loop_only_appends(response):
    """Prompt, response and end token are, token for token, the opening of the next prompt."""
    prompt = TOKENIZER.render([SYSTEM, USER], TOOLS)
    sampled = TOKENIZER.response_ids([SYSTEM, USER], response, TOOLS)
    after = TOKENIZER.render([SYSTEM, USER, response, RESULT], TOOLS).token_ids
    known = (*prompt.token_ids, *sampled, CONFIG["eos_token_id"])
    assert after[: len(known)] == known
    assert len(after) > len(known)


def test_turn_start_lies_before_the_generation_prompt():
    prompt = TOKENIZER.render([SYSTEM, USER])
    assert TOKENIZER.decode(prompt.token_ids[prompt.turn_start :]) == "<|im_start|>assistant<|im_sep|>"


def test_reasoning_before_the_last_user_message_is_dropped():
    text = TOKENIZER.render([SYSTEM, USER, LOOK, RESULT, ANSWER, NEXT, request(2, "{}", "look again")]).text
    assert "found it" not in text
    assert "<think>look again</think>" in text


def test_reasoning_is_kept_on_request():
    messages = [SYSTEM, USER, LOOK, RESULT, ANSWER]
    kept = TOKENIZER.render([*messages, NEXT], None, KEEP)
    assert "<think>found it</think>in a.py" in kept.text
    before = TOKENIZER.render(messages[:-1], None, KEEP).token_ids
    known = (*before, *TOKENIZER.response_ids(messages[:-1], ANSWER, None, KEEP))
    assert kept.token_ids[: len(known)] == known


def test_tools_tool_calls_and_results_are_rendered():
    text = TOKENIZER.render([USER, LOOK, RESULT], TOOLS[:1]).text
    assert text.startswith('<|im_start|>tools<|im_sep|>{"name": "list_files"')
    assert '<tool_call>grep<|im_sep|>{"pattern": "x", "path": "."}</tool_call><|im_end|>' in text
    assert "<|im_start|>tool<|im_sep|>\n    a.py:3: x = 1\n<|im_end|>" in text


def test_content_in_parts_and_arguments_as_objects():
    parts = {"role": "user", "content": [{"type": "text", "text": "where "}, {"type": "text", "text": "is x?"}]}
    assert TOKENIZER.render([parts]).token_ids == TOKENIZER.render([USER]).token_ids
    as_object = request(1, {"pattern": "x", "path": "."})
    assert TOKENIZER.render([USER, as_object]).token_ids == TOKENIZER.render([USER, LOOK]).token_ids


def test_an_unknown_role_is_refused():
    with pytest.raises(TemplateError, match="unknown role: narrator"):
        TOKENIZER.render([{"role": "narrator", "content": "once"}])
