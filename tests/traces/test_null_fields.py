"""Null in a field that may be left out is read as if it was left out, in every format."""

import json

import pytest

from jaxhybrid.traces.recognise import read_file

ASK, ANSWER = {"role": "user", "content": "list the files"}, {"role": "assistant", "content": "a.py"}
CASES = {
    "openai_chat": ({"messages": [ASK, ANSWER]}, ["tools", "calls", "id", "instance_id"]),
    "openai_chat, a call a line": (
        {"messages": [ASK], "response": ANSWER},
        ["tools", "session_id", "branch", "timestamp"],
    ),
    "swe_agent": ({"history": [ASK, ANSWER], "trajectory": []}, ["trajectory"]),
    "tau_bench": ({"task_id": 3, "traj": [ASK, ANSWER]}, ["trial"]),
    "atif": (
        {"schema_version": "ATIF-v1.8", "steps": [{"source": "user", "message": "list"}, {"source": "agent"}]},
        ["agent", "session_id", "trajectory_id", "subagent_trajectories"],
    ),
    "call_log": ({"timestamp": 1, "input": "list", "output": "", "session_id": "s"}, ["output"]),
    "mooncake": ({"timestamp": 0, "input_length": 9, "output_length": 0, "hash_ids": [1]}, ["output_length"]),
    "tracelab": (
        {"session_id": "s", "round_index": 0, "input_tokens_total": 9, "prefix_tokens": 0, "output_tokens": 0},
        ["prefix_tokens", "output_tokens", "timing_events"],
    ),
}


def read(path, value):
    path.write_text(json.dumps(value))
    (run,) = read_file(path)
    return run


@pytest.mark.parametrize("case", CASES)
def test_null_is_nothing(tmp_path, case):
    record, nullable = CASES[case]
    expected, nulls = read(tmp_path / "run.json", record), read(tmp_path / "run.json", record | dict.fromkeys(nullable))
    assert expected.format == nulls.format == case.partition(",")[0]
    assert repr(nulls) == repr(expected)


def test_null_in_a_weka_request(tmp_path):
    def request(t, length, hashes, **rest):
        return {"type": "n", "t": t, "in": length, "out": 2, "hash_ids": hashes, **rest}

    nested = {"type": "subagent", "t": 7.5, "duration_ms": None, "agent_id": None, "requests": [request(0, 4, [9])]}
    session = {
        "id": "s", "block_size": 4, "hash_id_scope": None,
        "requests": [request(5, 4, [1]), request(None, 8, [1, 2], out=None), nested],
    }  # fmt: skip
    run = read(tmp_path / "run.json", session)
    assert [(call.branch, call.timestamp_s, call.input_length, call.output_length) for call in run.calls] == [
        ("main", 5, 4, 2), ("main", 5, 8, 0), ("subagent", 7.5, 4, 2),
    ]  # fmt: skip
    assert run.scope == "weka/s"


def test_null_in_steps_tool_calls_and_observations(tmp_path):
    step = {"source": "agent", "tool_calls": [{"tool_call_id": "c", "function_name": "ls", "arguments": None}]}
    steps = [{"source": "user", "message": "list"}, step | {"observation": {"results": None}}, {"source": "agent"}]
    run = read(tmp_path / "run.json", {"schema_version": "ATIF-v1.8", "steps": steps})
    assert [call.response["content"] for call in run.calls] == ["", ""]
    assert run.calls[0].response["tool_calls"][0]["function"] == {"name": "ls", "arguments": {}}
    call = {"id": "c", "function": {"name": "ls", "arguments": None}}
    run = read(tmp_path / "run.json", {"messages": [ASK, {**ANSWER, "content": None, "tool_calls": [call]}]})
    assert run.calls[0].response["tool_calls"][0]["function"] == {"name": "ls", "arguments": {}}


def test_null_in_a_step_that_failed(tmp_path):
    run = read(tmp_path / "run.json", {"history": [ASK], "trajectory": [{"response": None, "query": [ASK]}]})
    assert [call.response for call in run.calls] == [{"role": "assistant", "content": ""}]
