"""Where a stop string begins, in tokens; and an engine that ends there."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import jaxhybrid as jh
from jaxhybrid.chat import ChatTokenizer
from jaxhybrid.engine.stop_strings import kept_tokens
from jaxhybrid.models.random_folder import write_random_folder

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_folder(GOLDENS / "chat" / "tokenizer")


def as_bytes(made: Sequence[int]) -> str:
    """A token is a byte; a character cut off at the end is a replacement character, as tokenizers decode it."""
    return bytes(made).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("abcdef", ("x",), None),
        ("", ("x",), None),
        ("abcdef", ("cd",), "ab"),
        ("abcdef", ("a",), ""),
        ("abcdef", ("f",), "abcde"),
        ("abcdef", ("ef", "bc", "x"), "a"),  # the earliest of several
        ("abab", ("ab",), ""),
        ("aé😀b!", ("!",), "aé😀b"),
        ("aé😀b!", ("😀",), "aé"),
        ("aé😀b!", ("é",), "a"),
        ("aé😀b!", ("b",), "aé😀"),
        ("中文。終", ("。",), "中文"),
    ],
)
def test_tokens_before_the_stop_string(text: str, stops: tuple[str, ...], kept: str | None) -> None:
    found = kept_tokens(text.encode(), stops, as_bytes)
    assert found == (None if kept is None else len(kept.encode()))


def test_a_token_that_reaches_into_the_stop_string_goes_with_it() -> None:
    pieces = ["ab", "cx", "yd", "e"]
    assert kept_tokens([0, 1, 2, 3], ("xy",), lambda made: "".join(pieces[token] for token in made)) == 1


def test_a_character_cut_off_at_the_end_is_no_stop_string() -> None:
    made = "a😀".encode()[:-1]
    assert kept_tokens(made, ("😀",), as_bytes) is None


@pytest.mark.parametrize("text", ["héllo wörld END more", "x 😀😀 END", "tabs\tand\n\nlines END"])
def test_with_a_published_style_tokenizer(tokenizer: ChatTokenizer, text: str) -> None:
    made = tokenizer.encode(text)
    kept = kept_tokens(made, ("END",), tokenizer.decode)
    assert kept is not None
    at = text.index("END")
    assert text[:at].startswith(tokenizer.decode(made[:kept]))
    assert len(tokenizer.decode(made[: kept + 1])) > at


# Through the engine

CONFIG = jh.EngineConfig(
    max_sequences=2, max_tokens=512, max_context=128, page_size=8, max_checkpoints=6, prefill_chunks=(16,),
    row_buckets=(2,), steps_per_dispatch=4, poison=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> jh.Model:
    """The tiny hybrid with as many tokens as a tokenizer needs, and that tokenizer."""
    config = json.loads((tiny_folder / "config.json").read_text()) | {"vocab_size": 1024}
    folder = write_random_folder(tmp_path_factory.mktemp("texts"), config, seed=4)
    for file in (GOLDENS / "chat" / "tokenizer").iterdir():
        shutil.copy(file, folder)
    return jh.load_model(folder)


@pytest.fixture(scope="module")
def engine(model: jh.Model) -> jh.Engine:
    return jh.Engine(model, CONFIG)


PROMPT = np.random.default_rng(8).integers(3, 1024, 13).tolist()
SAMPLED = jh.Sampling(max_tokens=16, temperature=1.0, seed=21)


@pytest.fixture(scope="module")
def unstopped(engine: jh.Engine) -> tuple[int, ...]:
    return engine.generate([engine.prefill(PROMPT)], SAMPLED)[0].tokens


def stopped_at(engine: jh.Engine, stop: tuple[str, ...]) -> tuple[jh.Sequence, jh.Generation]:
    options = jh.Sampling(max_tokens=16, temperature=1.0, seed=21, stop=stop)
    sequence = engine.prefill(PROMPT)
    return sequence, engine.generate([sequence], options)[0]


def spanning(decode, made: Sequence[int], first: int, last: int) -> str:
    """The text of tokens first to last, last included."""
    start, end = len(decode(made[:first])), len(decode(made[: last + 1]))
    return decode(made)[start:end]


@pytest.mark.parametrize(("first", "last"), [(5, 5), (3, 4), (6, 9), (0, 1)], ids=str)
def test_a_stop_string_ends_a_sequence_where_it_begins(
    engine: jh.Engine, model: jh.Model, unstopped: tuple[int, ...], first: int, last: int
) -> None:
    """Dispatches are of four tokens: (3, 4) begins in one and ends in the next, (6, 9) spans three."""
    stop = spanning(model.tokenizer.decode, unstopped, first, last)
    assert stop
    assert model.tokenizer.decode(unstopped).index(stop) == len(model.tokenizer.decode(unstopped[:first]))
    sequence, made = stopped_at(engine, (stop, "never there"))
    assert (made.tokens, made.finish_reason) == (unstopped[:first], "stop")
    assert len(made.log_probs) == first
    assert sequence.tokens.tolist() == [*PROMPT, *unstopped[:first]]
    expected = np.asarray(jh.forward(model, sequence.tokens))[-1]
    assert np.allclose(sequence.logits(), expected, atol=2e-4)
    engine.extend(sequence, [7, 9])
    expected = np.asarray(jh.forward(model, sequence.tokens))[-1]
    assert np.allclose(sequence.logits(), expected, atol=2e-4)


def test_a_stop_string_that_does_not_come_changes_nothing(engine: jh.Engine, unstopped: tuple[int, ...]) -> None:
    _, made = stopped_at(engine, ("never there",))
    assert (made.tokens, made.finish_reason) == (unstopped, "length")


def test_a_forced_response_is_taken_whole(engine: jh.Engine, model: jh.Model, unstopped: tuple[int, ...]) -> None:
    stop = spanning(model.tokenizer.decode, unstopped, 3, 4)
    options = jh.Sampling(max_tokens=16, stop=(stop,))
    made = engine.generate([engine.prefill(PROMPT)], options, forced=[unstopped])[0]
    assert made.tokens == unstopped
