import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record
from jaxhybrid.traces.recognise import READERS, read_file, reader_named, recognise
from jaxhybrid.traces.trajectory import Trajectory

MESSAGE = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
SAMPLES = {
    "atif": {"schema_version": "ATIF-v1.5", "steps": []},
    "call_log": {"timestamp": 1, "input": "a", "output": "b", "session_id": "s"},
    "mooncake": {"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]},
    "openai_chat": {"messages": [MESSAGE], "calls": []},
    "recorded_calls": {"format": "jaxhybrid.recorded_calls", "id": "r", "calls": []},
    "swe_agent": {"history": [], "trajectory": [], "info": {}},
    "tau_bench": [{"task_id": 1, "traj": [MESSAGE], "trial": 0}],
    "tracelab": {"session_id": "s", "round_index": 0, "input_tokens_total": 2, "prefix_tokens": 1, "output_tokens": 1},
    "weka": {"id": "a", "block_size": 4, "requests": []},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_each_format_is_recognised_by_its_reader_alone(name):
    assert [reader.FORMAT for reader in READERS.values() if reader.recognises(SAMPLES[name])] == [name]
    assert recognise(SAMPLES[name]) is reader_named(name)


def test_samples_cover_all_readers():
    assert set(SAMPLES) == set(READERS)


def test_the_first_recognised_record_decides(tmp_path):
    file = tmp_path / "log.jsonl"
    lines = ["{broken", json.dumps({"what": 1}), json.dumps(SAMPLES["call_log"]), "[]", json.dumps(SAMPLES["weka"])]
    file.write_text("\n".join(lines))
    items = list(read_file(file))
    assert [item.id for item in items if isinstance(item, Trajectory)] == ["s"]
    errors = "\n".join(str(item) for item in items if isinstance(item, TraceError))
    assert f"{file}:1: expected JSON" in errors
    assert f"{file}:2: expected one of atif, call_log, mooncake" in errors
    assert "got an object with what" in errors
    assert f"{file}:5: Object missing required field" in errors


def test_a_forced_format_reads_nothing_else(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps(SAMPLES["call_log"]))
    (error,) = read_file(file, "openai_chat")
    problem = r"log.jsonl:1: Object missing required field `messages` \(read as openai_chat, as asked for\)"
    with pytest.raises(TraceError, match=problem):
        raise error
    with pytest.raises(TraceError, match=r"unknown trace format 'lmcache': expected one of atif, call_log, "):
        list(read_file(file, "lmcache"))


def test_reading_traces_does_not_load_jax():
    code = "import sys, jaxhybrid.traces.recognise, jaxhybrid.traces.tokenise; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["assistant"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
)


def mutations(value):
    """A sample with one of its parts, at any depth, replaced by any JSON."""
    options = [JSON]
    if isinstance(value, dict) and value:
        options += [mutations(v).map(lambda new, k=k: {**value, k: new}) for k, v in value.items()]
    if isinstance(value, list) and value:
        options += [mutations(v).map(lambda new, i=i: [*value[:i], new, *value[i + 1 :]]) for i, v in enumerate(value)]
    return st.one_of(options)


RICH = [
    {
        "messages": [
            MESSAGE,
            {"role": "assistant", "content": [{"type": "text", "text": "a"}], "extra": {"response": {}}},
        ]
    },
    {"messages": [MESSAGE], "response": {"choices": [{"message": {"role": "assistant", "content": "a"}}]}},
    {
        "schema_version": "ATIF-v1.8",
        "agent": {"tool_definitions": [{}]},
        "steps": [
            {"source": "user", "message": "a", "timestamp": "2026-01-01"},
            {
                "source": "agent",
                "message": "a",
                "tool_calls": [{"tool_call_id": "c", "function_name": "f", "arguments": {}}],
                "observation": {"results": [{"content": "a", "subagent_trajectory_ref": [{"trajectory_id": "t"}]}]},
            },
        ],
        "subagent_trajectories": [{"steps": [], "trajectory_id": "t"}],
    },
    {
        "history": [{**MESSAGE, "agent": "a"}, {"role": "assistant", "content": "a", "tool_call_ids": ["c"]}],
        "trajectory": [{"response": "a", "query": [MESSAGE]}],
    },
    {
        "format": "jaxhybrid.recorded_calls",
        "id": "r",
        "tools": [{}],
        "calls": [
            {
                "branch": "b",
                "parent": None,
                "keep": 0,
                "append": [MESSAGE],
                "response": {**MESSAGE, "role": "assistant"},
            },
            {"branch": "b", "parent": 0, "keep": 2, "append": [MESSAGE], "response": {**MESSAGE, "role": "assistant"}},
        ],
    },
    {"messages_display": "user: a\nassistant: b"},
    {"id": "a", "block_size": 4, "requests": [{"type": "n", "t": 1, "in": 4, "out": 1, "hash_ids": [1]}]},
]


@given(data=st.data())
def test_no_content_makes_a_reader_raise(tmp_path_factory, data):
    sample = data.draw(st.sampled_from([*RICH, *SAMPLES.values()]))
    value = data.draw(mutations(sample))
    file = tmp_path_factory.getbasetemp() / "any.json"
    forced = data.draw(st.sampled_from(list(READERS)))
    for reader in {reader_named(forced), recognise(sample), recognise(value)} - {None}:
        for item in reader.read([Record(value, f"{file}:1", file)]):
            assert isinstance(item, Trajectory | TraceError)
            if isinstance(item, TraceError):
                assert str(item).startswith(str(file))
