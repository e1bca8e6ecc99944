"""The trajectories in the package: readable, varied, and what the recorder makes today."""

import json
import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest

import jaxhybrid.demo
from jaxhybrid.demo.trajectories import shipped_trajectories
from jaxhybrid.traces.recognise import read_file
from jaxhybrid.traces.trajectory import MessageCall, Trajectory

FOLDER = Path(jaxhybrid.demo.__file__).parent / "traces"
FILES = sorted(FOLDER.glob("*.json"))


def read(file: Path) -> Trajectory:
    (trajectory,) = read_file(file)
    assert isinstance(trajectory, Trajectory)
    return trajectory


def messages_of(trajectory: Trajectory) -> list[MessageCall]:
    assert all(isinstance(call, MessageCall) for call in trajectory.calls)
    return list(trajectory.calls)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_is_read_whole_and_its_calls_answer_their_prompts(file):
    trajectory = read(file)
    recorded = json.loads(file.read_text())["calls"]
    assert 10 <= len(trajectory.calls) == len(recorded) <= 25
    for call, source in zip(messages_of(trajectory), recorded, strict=True):
        assert call.response == source["response"]
        asked = {t["id"] for m in call.messages for t in m.get("tool_calls") or []}
        assert {m["tool_call_id"] for m in call.messages if m["role"] == "tool"} <= asked


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_written_about_a_parent_is_what_the_reader_finds(file):
    recorded = json.loads(file.read_text())["calls"]
    for number, (call, source) in enumerate(zip(read(file).calls, recorded, strict=True)):
        assert call.branch == source["branch"]
        assert (call.parent is None) == (number == 0)


def test_together_they_hold_forks_an_edit_and_a_repeated_question():
    forks = edits = repeats = 0
    for file in FILES:
        calls = messages_of(read(file))
        forks += len({call.branch for call in calls} - {"main"})
        main = [call for call in calls if call.branch == "main"]
        for before, after in pairwise(main):
            repeats += after.messages == before.messages
            known = (*before.messages, before.response)
            edits += after.messages != before.messages and after.messages[: len(known)] != known
    assert forks >= 4
    assert edits >= 2
    assert repeats >= 2


def test_they_are_small():
    assert len(FILES) == 5
    assert sum(file.stat().st_size for file in FILES) < 1_000_000


def test_recording_them_today_gives_the_same_files():
    """Where the standard library's sources and its test reports are those of the Python they were recorded with."""
    recorded = {file.stem: json.loads(file.read_text()) for file in FILES}
    fresh = {recording.id: json.loads(json.dumps(recording.to_json())) for recording in shipped_trajectories(5)}
    if _file_lengths(fresh) != _file_lengths(recorded):
        version = sysconfig.get_python_version()
        pytest.skip(f"Python {version} has other sources than the one that recorded the shipped traces")
    assert fresh == recorded


def _file_lengths(trajectories: dict) -> list[str]:
    """The listing each agent starts with: files and their line counts."""
    return [
        next(m["content"] for c in trajectory["calls"] for m in c["append"] if m["role"] == "tool")
        for trajectory in trajectories.values()
    ]


def test_arguments_are_json_objects():
    for file in FILES:
        for call in messages_of(read(file)):
            for request in call.response.get("tool_calls") or []:
                assert isinstance(json.loads(request["function"]["arguments"]), dict)
                assert request["function"]["name"] in _tool_names(file)


def _tool_names(file: Path) -> list[str]:
    return [tool["function"]["name"] for tool in json.loads(file.read_text())["tools"]]
