"""Recorded trajectories: the same each time, and with the branches, edits and repeats they claim."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxhybrid.demo.recorder import Conversation, Recording
from jaxhybrid.demo.scripted_agent import record
from jaxhybrid.demo.workspace import Workspace

SYSTEM = {"role": "system", "content": "be brief"}


@pytest.fixture
def talk(tmp_path: Path) -> Conversation:
    workspace = Workspace(tmp_path)
    workspace.write("a.txt", "one\ntwo\n")
    conversation = Conversation(Recording("t", workspace), "main", [SYSTEM])
    conversation.user("read a.txt")
    conversation.use("look", ("read_file", {"path": "a.txt"}))
    return conversation


def calls(talk: Conversation) -> list[dict[str, Any]]:
    return talk.recording.to_json()["calls"]


def test_a_call_that_goes_on_keeps_all_and_appends_the_result(talk: Conversation) -> None:
    talk.answer("done", "two lines")
    first, second = calls(talk)
    assert (first["parent"], first["keep"], len(first["append"])) == (None, 0, 2)
    assert (second["parent"], second["keep"]) == (0, 3)
    assert second["append"] == [
        {"role": "tool", "tool_call_id": "call_1", "content": "a.txt, lines 1 to 2 of 2\none\ntwo"}
    ]


def test_a_fork_continues_the_prompt_of_the_call_that_made_it(talk: Conversation) -> None:
    helper = talk.fork("scout", "count the lines")
    helper.answer("two", "2")
    fork = calls(talk)[1]
    assert (fork["branch"], fork["parent"], fork["keep"]) == ("scout", 0, 2)
    assert fork["append"] == [{"role": "user", "content": "count the lines"}]


def test_a_shortened_result_is_where_the_kept_prefix_ends(talk: Conversation) -> None:
    talk.shorten_result(3, "[left out]")
    talk.answer("done", "two lines")
    edited = calls(talk)[1]
    assert edited["keep"] == 3
    assert edited["append"][0]["content"] == "[left out]"
    assert talk.recording.calls[0].messages == tuple(talk.messages[:2])


def test_asking_again_sends_the_same_prompt_and_replaces_the_answer(talk: Conversation) -> None:
    talk.answer("done", "two lines")
    talk.ask_again("shorter", "2")
    asked, again = calls(talk)[1:]
    assert (again["parent"], again["keep"], again["append"]) == (1, asked["keep"] + len(asked["append"]), [])
    assert [m["content"] for m in talk.messages if m["role"] == "assistant"] == ["", "2"]


def test_recording_twice_gives_the_same_text(tmp_path: Path) -> None:
    texts = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        texts.append(json.dumps(record(tmp_path / name, "again", "shlex", ["graphlib"], seed=7).to_json()))
    assert texts[0] == texts[1]
    assert str(tmp_path) not in texts[0]


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    texts = set()
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        texts.add(json.dumps(record(folder, "seeds", "colorsys", ["shlex"], seed).to_json()["calls"]))
    assert len(texts) == 2
