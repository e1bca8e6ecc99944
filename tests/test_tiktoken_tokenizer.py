"""`tiktoken.model` and the tokens after it."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kimi_folder import FIRST_CONTROL, K3_TOKENS, tiktoken_model, write_kimi_folder

from jaxhybrid.chat import ChatTokenizer
from jaxhybrid.errors import TokenError
from jaxhybrid.tiktoken_tokenizer import MAX_CHARACTERS, MAX_RUN, TiktokenTokenizer

KIMI_LINEAR = {"model_type": "kimi_linear", "eos_token_id": FIRST_CONTROL + 2}
K2_TOKENS = {
    FIRST_CONTROL + place: name
    for place, name in enumerate(("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"))
}


@pytest.fixture(scope="module")
def small() -> TiktokenTokenizer:
    declared = {str(token_id): {"content": name} for token_id, name in K3_TOKENS.items()}
    return TiktokenTokenizer.from_bytes(tiktoken_model(), {"added_tokens_decoder": declared}, Path("folder"))


def pieces_of(text: str, pieces: list[str]) -> list[str]:
    """The pieces that tokens are made within: those of a tokenizer in which each wanted piece is a token."""
    tokens = {bytes([byte]): byte for byte in range(256)}
    for piece in pieces:
        tokens.setdefault(piece.encode(), len(tokens))
    tokenizer = TiktokenTokenizer(tokens, {"<|end|>": len(tokens)})
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode_ordinary(text)]


@pytest.mark.parametrize(
    "pieces",
    [
        ["Read", "Me", " please", ",", " isn't", " it", "?\n\n", "YES"],
        ["漢字", "かな", " is", " mixed", "漢", "ABC", "漢"],
        ["def", " f", "(x", "):\n", "   ", " return", " x", "_two"],  # all but the last space of a run
        ["123", "456", "7", ".", "89"],
        ["a", " \r\n", "  ", " b", "\t"],
        ["<|", "open", "|>", "message", " role", '="', "user", '"<|'],
        ["Él", "ÉCOLE", " naïve", " we're", " '", "quoted", "'"],
    ],
)
def test_text_is_cut_as_kimi_cuts_it(pieces):
    assert pieces_of("".join(pieces), pieces) == pieces


def test_merges_go_by_rank(small):
    assert [small.decode([i]) for i in small.encode("Hello messages")] == ["Hello", " ", "mess", "a", "g", "e", "s"]
    assert small.encode("message") == [small.token_to_id("message")]
    assert [small.decode([i]) for i in small.encode("汉字")] == ["汉字"]


def test_control_tokens_have_their_declared_names_or_numbers(small):
    assert small.token_to_id("<|open|>") == FIRST_CONTROL + 3
    assert small.token_to_id(f"<|reserved_token_{FIRST_CONTROL + 6}|>") == FIRST_CONTROL + 6
    assert small.token_to_id(f"<|reserved_token_{FIRST_CONTROL + 3}|>") is None
    assert small.ids == frozenset(range(FIRST_CONTROL + 256))
    assert small.control_ids == frozenset(range(FIRST_CONTROL, FIRST_CONTROL + 256))


def test_names_of_control_tokens_are_tokens_or_spelt_out(small):
    text = f"Hello<|open|>message<|reserved_token_{FIRST_CONTROL + 6}|>[EOS]"
    ids = small.encode(text)
    assert [i - FIRST_CONTROL for i in ids if i >= FIRST_CONTROL] == [3, 6, 1]
    ordinary = small.encode_ordinary(text)
    assert small.control_ids.isdisjoint(ordinary)
    assert small.decode(ids) == small.decode(ordinary) == text


@given(text=st.text(max_size=60))
def test_decoding_gives_the_text_back(small, text):
    assert small.decode(small.encode(text)) == text
    assert small.decode(small.encode_ordinary(text)) == text


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("Hello " + "x" * (MAX_RUN - 2) + "Hello", 6 + MAX_RUN),
        (" " * MAX_RUN + " " + "Hello", MAX_RUN),
        (("." * 99 + "\n") * (MAX_CHARACTERS // 100 - 1) + "." * 98 + "Hello", MAX_CHARACTERS),
    ],
)
def test_long_text_is_cut_where_the_published_tokenizer_cuts_it(small, text, cut):
    ids = small.encode(text)
    assert ids == small.encode(text[:cut]) + small.encode(text[cut:])
    assert small.decode(ids) == text


def test_runs_below_the_limit_are_not_cut(small):
    text = ("x" * (MAX_RUN - 5) + "Hello ") * 2
    assert small.encode(text).count(small.token_to_id("Hello")) == 2


# In a checkpoint's folder


def test_a_folder_with_a_jinja_template_renders(tmp_path):
    folder = write_kimi_folder(tmp_path, KIMI_LINEAR, K2_TOKENS)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
    )
    tokenizer = ChatTokenizer.from_folder(folder)
    prompt = tokenizer.render([{"role": "user", "content": "Hello 汉字"}])
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert tokenizer.decode(prompt.token_ids[prompt.turn_start :]) == "<|im_assistant|>assistant<|im_middle|>"
    assert [i - FIRST_CONTROL for i in prompt.token_ids if i >= FIRST_CONTROL] == [3, 5, 2, 4, 5]
    response = tokenizer.response_ids([{"role": "user", "content": "Hi"}], {"role": "assistant", "content": "Hello"})
    assert response == tokenizer.encode("Hello")
    assert [tokenizer.decode([i]) for i in tokenizer.end_token_ids] == ["[EOS]", "<|im_end|>"]
    assert tokenizer.vocab_size == FIRST_CONTROL + 256


def test_the_fingerprint_covers_tokens_and_their_names(tmp_path):
    folder = write_kimi_folder(tmp_path, KIMI_LINEAR, K2_TOKENS)
    fingerprints = {ChatTokenizer.from_folder(folder).fingerprint}
    write_kimi_folder(tmp_path, KIMI_LINEAR, {**K2_TOKENS, FIRST_CONTROL + 9: "<|im_system|>"})
    fingerprints.add(ChatTokenizer.from_folder(folder).fingerprint)
    (folder / "tiktoken.model").write_bytes(tiktoken_model(("other",)))
    write_names = {str(257 + place): {"content": name} for place, name in enumerate(("[BOS]", "[EOS]", "<|im_end|>"))}
    settings = {"added_tokens_decoder": write_names, "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    fingerprints.add(ChatTokenizer.from_folder(folder).fingerprint)
    assert len(fingerprints) == 3


def test_tokenizer_json_comes_first(tmp_path):
    write_kimi_folder(tmp_path, KIMI_LINEAR)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenError, match=r"tokenizer\.json: not a tokenizer"):
        ChatTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["\ud800", b"bytes", None])
def test_text_that_is_no_unicode_is_refused(tmp_path, text):
    tokenizer = ChatTokenizer.from_folder(write_kimi_folder(tmp_path, KIMI_LINEAR))
    with pytest.raises(TokenError, match="expected Unicode text"):
        tokenizer.encode(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"!!!! 256", r"line 257: expected a base64 token and a rank, got b'!!!! 256'"),
        (b"SGVs", r"line 257: expected a base64 token and a rank"),
        (b"SGVs 256 7", r"line 257: expected a base64 token and a rank"),
        (b"SGVs second", r"line 257: expected a base64 token and a rank"),
        (b"SGVs 7", r"line 257: expected a token and a rank not seen before, got b'SGVs 7'"),
        (base64.b64encode(b"a") + b" 256", r"line 257: expected a token and a rank not seen before"),
        (b"SGVs 300", r"expected ranks 0 to 256, found 0 to 300"),
    ],
)
def test_an_unreadable_line_is_named(tmp_path, line, message):
    folder = write_kimi_folder(tmp_path, KIMI_LINEAR)
    (folder / "tiktoken.model").write_bytes(tiktoken_model(()) + line + b"\n")
    with pytest.raises(TokenError, match=r"tiktoken\.model: " + message):
        ChatTokenizer.from_folder(folder)


def test_a_file_without_all_bytes_is_refused(tmp_path):
    folder = write_kimi_folder(tmp_path, KIMI_LINEAR)
    lines = tiktoken_model(()).splitlines(keepends=True)
    (folder / "tiktoken.model").write_bytes(b"".join(lines[:-2]))
    with pytest.raises(TokenError, match=r"expected a token for each byte, found none for \[254, 255\] of 254 tokens"):
        ChatTokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"7": {"content": "<|open|>"}},
            rf"names of their own for ids from {FIRST_CONTROL} on, got '<\|open\|>' for 7",
        ),
        (
            {str(FIRST_CONTROL): {"content": "a"}, str(FIRST_CONTROL + 1): {"content": "a"}},
            rf"got 'a' for {FIRST_CONTROL + 1}",
        ),
        ({"x": {"content": "a"}}, "expected ids with tokens, each with its content"),
        ({"300": {"special": True}}, "expected ids with tokens, each with its content"),
        ([], "expected ids with tokens, each with its content"),
    ],
)
def test_unfit_control_tokens_are_refused(tmp_path, declared, message):
    folder = write_kimi_folder(tmp_path, KIMI_LINEAR, settings={"added_tokens_decoder": declared})
    with pytest.raises(TokenError, match=rf"tokenizer_config\.json: added_tokens_decoder: .*{message}"):
        ChatTokenizer.from_folder(folder)
