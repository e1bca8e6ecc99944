"""Readers of formats that record chat messages: OpenAI chat, tau-bench, SWE-agent, ATIF."""

import json

import pytest

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.readers.messages import normalise, text_of
from jaxhybrid.traces.recognise import read_file

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "List the files."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "ls", "content": [{"type": "text", "text": "a.py"}]}
ANSWER = {"role": "assistant", "content": "One file: a.py."}
RUN = [SYSTEM, ASK, CALL, RESULT, ANSWER]


def read(tmp_path, value, name="run.json", format=None):
    file = tmp_path / name
    lines = value if name.endswith(".jsonl") else [value]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return list(read_file(file, format))


def roles(call):
    return [message["role"] for message in call.messages]


class TestMessages:
    def test_content_of_any_shape_becomes_text(self):
        assert text_of(None, "f:1") == ""
        assert text_of("a", "f:1") == "a"
        assert text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "f:1") == "ab"

    @pytest.mark.parametrize(
        ("message", "problem"),
        [
            (
                {**ASK, "content": [{"type": "image_url"}]},
                r"f:1: expected content parts .*'text', got 'image_url'",
            ),
            ({**ASK, "content": 3}, r"f:1: expected content as text, a list of parts or null, got int"),
            ({**ASK, "role": "exit"}, r"f:1: expected role assistant, .*, user, got 'exit'"),
            ({**CALL, "tool_calls": [{"id": "c1"}]}, r"f:1: expected tool calls with function.name"),
            ({**CALL, "tool_calls": 4}, r"f:1: expected tool_calls as a list, got int"),
            ({**ANSWER, "function_call": {"name": "ls"}}, r"f:1: expected 'tool_calls', got the obsolete"),
            ("hello", r"f:1: expected a message object, got str"),
        ],
    )
    def test_what_no_template_can_take_is_named(self, message, problem):
        with pytest.raises(TraceError, match=problem):
            normalise(message, "f:1")

    def test_arguments_stay_text_or_object(self):
        call = {"function": {"name": "ls", "arguments": {"path": "."}}, "index": 0}
        clean = normalise({**CALL, "tool_calls": [*CALL["tool_calls"], call], "extra": 1}, "f:1")
        assert [c["function"]["arguments"] for c in clean["tool_calls"]] == ['{"path": "."}', {"path": "."}]
        assert clean["tool_calls"][1] == {"type": "function", "function": {"name": "ls", "arguments": {"path": "."}}}
        assert set(clean) == {"role", "content", "tool_calls"}

    def test_developer_is_system(self):
        assert normalise({**SYSTEM, "role": "developer"}, "f:1")["role"] == "system"


class TestOpenAIChat:
    def test_each_assistant_message_is_a_call(self, tmp_path):
        tools = [{"type": "function", "function": {"name": "ls"}}]
        (run,) = read(tmp_path, {"messages": [*RUN, {"role": "exit", "content": ""}], "tools": tools, "id": "r1"})
        assert (run.id, run.format, run.source) == ("r1", "openai_chat", f"{tmp_path / 'run.json'}:1")
        assert [roles(call) for call in run.calls] == [["system", "user"], ["system", "user", "assistant", "tool"]]
        assert run.calls[0].response["tool_calls"] == CALL["tool_calls"]
        assert run.calls[1].messages[3]["content"] == "a.py"
        assert run.calls[1].response == ANSWER
        assert run.calls[1].tools == tuple(tools)
        assert [call.parent for call in run.calls] == [None, 0]

    def test_times_come_from_the_log_or_the_providers_answer(self, tmp_path):
        (logged,) = read(tmp_path, {"messages": RUN, "calls": [{"created": 10}, {"created": 12.5}]})
        assert [call.timestamp_s for call in logged.calls] == [10, 12.5]
        answered = [*RUN[:-1], {**ANSWER, "extra": {"response": {"created": 7}}}]
        (raw,) = read(tmp_path, {"messages": answered})
        assert [call.timestamp_s for call in raw.calls] == [None, 7]

    def test_a_bare_list_of_messages_and_a_list_of_runs(self, tmp_path):
        (bare,) = read(tmp_path, RUN)
        assert len(bare.calls) == 2
        two = read(tmp_path, [{"messages": RUN}, {"messages": RUN[:3]}])
        assert [(run.id, len(run.calls)) for run in two] == [("run[0]", 2), ("run[1]", 1)]

    def test_a_trajectory_a_line_with_broken_lines_between(self, tmp_path):
        lines = [{"messages": RUN}, {"messages": [ASK]}, {"messages": "?"}, {"messages": RUN}]
        first, silent, wrong, last = read(tmp_path, lines, "runs.jsonl")
        assert (first.id, last.id) == ("runs", "runs:4")
        assert str(silent).endswith("runs.jsonl:2: expected an assistant message after a prompt, got 1 messages")
        assert str(wrong).endswith("runs.jsonl:3: Expected `array`, got `str` - at `$.messages`")

    def test_a_greeting_is_prompt_not_response(self, tmp_path):
        (run,) = read(tmp_path, [ANSWER, ASK, CALL])
        assert [roles(call) for call in run.calls] == [["assistant", "user"]]

    def test_a_call_a_line_is_grouped_by_session(self, tmp_path):
        def line(session, messages, response, **rest):
            return {"session_id": session, "messages": messages, "response": response, **rest}

        lines = [
            line("s1", RUN[:2], CALL, timestamp=5.0),
            line("s2", [ASK], {"choices": [{"message": ANSWER}]}, branch="helper"),
            line("s1", RUN[:4], ANSWER),
            line("s1", RUN[:4], {"choices": []}),
        ]
        error, one, two = read(tmp_path, lines, "calls.jsonl")
        assert "calls.jsonl:4: response: expected a message object, got NoneType" in str(error)
        assert (one.id, [call.parent for call in one.calls], one.calls[0].timestamp_s) == ("s1", [None, 0], 5.0)
        assert (two.id, two.calls[0].branch, two.calls[0].response) == ("s2", "helper", ANSWER)
        assert two.source.endswith("calls.jsonl:2")


class TestTauBench:
    def test_trials_are_trajectories_that_share_a_prompt(self, tmp_path):
        results = [{"task_id": 3, "trial": trial, "reward": 1.0, "info": {}, "traj": RUN} for trial in (0, 1)]
        one, two = read(tmp_path, results, "airline.json")
        assert (one.id, two.id) == ("airline-task3-trial0", "airline-task3-trial1")
        assert one.calls[0].messages == two.calls[0].messages
        assert one.source.endswith("airline.json[0]")

    def test_few_shot_dialogue(self, tmp_path):
        display = "user: Hi.\nassistant: None\ntool: {}\nassistant: First line\n\nsecond: line\nuser: Bye."
        (run,) = read(tmp_path, [{"messages_display": display}], "shots.jsonl")
        assert run.format == "tau_bench"
        assert [call.response["content"] for call in run.calls] == ["", "First line\n\nsecond: line"]
        assert roles(run.calls[1]) == ["user", "assistant", "tool"]


class TestSweAgent:
    def test_history_by_agent_with_demonstrations_in_the_prompt(self, tmp_path):
        def entry(role, content, agent="primary", **rest):
            return {"role": role, "content": content, "agent": agent, **rest}

        history = [
            entry("system", "S"),
            entry("user", "demo", is_demo=True),
            entry("assistant", "demo answer", is_demo=True),
            entry("user", "task"),
            entry("assistant", "look", thought="l", action="ls"),
            entry("system", "helper S", "helper"),
            entry("user", "part", "helper"),
            entry("assistant", "found", "helper"),
            entry("tool", [{"type": "text", "text": "a.py"}], tool_call_ids=["c1"]),
            entry("assistant", "done", tool_calls=CALL["tool_calls"]),
        ]
        (run,) = read(tmp_path, {"history": history, "trajectory": [{"response": "look"}], "info": {}}, "demo.traj")
        assert (run.id, run.format) == ("demo", "swe_agent")
        assert [(call.branch, call.parent, call.response["content"]) for call in run.calls] == [
            ("main", None, "look"),
            ("helper", None, "found"),
            ("main", 0, "done"),
        ]
        assert roles(run.calls[1]) == ["system", "user"]
        assert roles(run.calls[2]) == ["system", "user", "assistant", "user", "assistant", "tool"]
        assert run.calls[2].messages[-1]["tool_call_id"] == "c1"

    def test_recorded_queries_are_the_prompts(self, tmp_path):
        history = [SYSTEM, ASK, {**CALL, "content": "look"}, RESULT, ANSWER]
        steps = [
            {"response": "look", "query": [SYSTEM, ASK]},
            {"response": "not in the history", "query": [SYSTEM, ASK, ASK]},
            {"response": ANSWER["content"], "query": [SYSTEM, {**ASK, "content": "omitted"}]},
        ]
        (run,) = read(tmp_path, {"history": history, "trajectory": steps})
        assert [roles(call) for call in run.calls] == [
            ["system", "user"],
            ["system", "user", "user"],
            ["system", "user"],
        ]
        assert run.calls[0].response["tool_calls"] == CALL["tool_calls"]
        assert [call.response["content"] for call in run.calls[1:]] == ["not in the history", ANSWER["content"]]
        assert run.calls[2].messages[1]["content"] == "omitted"


class TestRecordedCalls:
    @staticmethod
    def recording(*calls):
        return {"format": "jaxhybrid.recorded_calls", "id": "demo-1", "tools": [{"type": "function"}], "calls": calls}

    @staticmethod
    def call(keep, append, response=ANSWER, parent=0, branch="main"):
        return {"branch": branch, "parent": parent, "keep": keep, "append": append, "response": response}

    def test_prompts_are_built_from_the_parents(self, tmp_path):
        calls = [
            self.call(0, [SYSTEM, ASK], CALL, parent=None),
            self.call(3, [RESULT]),
            self.call(2, [ASK], branch="helper"),
            self.call(2, []),
        ]
        (run,) = read(tmp_path, self.recording(*calls))
        assert (run.id, run.format) == ("demo-1", "recorded_calls")
        assert [roles(call) for call in run.calls] == [
            ["system", "user"],
            ["system", "user", "assistant", "tool"],
            ["system", "user", "user"],
            ["system", "user"],
        ]
        assert run.calls[1].messages[2] == run.calls[0].response
        assert [call.branch for call in run.calls] == ["main", "main", "helper", "main"]
        assert run.calls[2].tools == ({"type": "function"},)
        assert [call.parent for call in run.calls] == [None, 0, 0, 1]

    @pytest.mark.parametrize(
        ("call", "problem"),
        [
            ({"keep": 4, "append": []}, r"call 1: expected to keep at most 3 messages, got 4"),
            ({"keep": 0, "append": []}, r"call 1: expected a prompt, got no messages"),
            ({"keep": 1, "append": [], "parent": 1}, r"call 1: expected an earlier call as parent, got 1"),
        ],
    )
    def test_what_has_no_prompt_is_named(self, tmp_path, call, problem):
        first = self.call(0, [SYSTEM, ASK], parent=None)
        (error,) = read(tmp_path, self.recording(first, self.call(**call)))
        with pytest.raises(TraceError, match=problem):
            raise error


def atif(**rest):
    return {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, **rest}


def step(number, source, message, **rest):
    return {"step_id": number, "source": source, "message": message, **rest}


class TestAtif:
    helper = atif(
        trajectory_id="helper",
        steps=[
            step(1, "system", "S"),
            step(2, "user", "task", is_copied_context=True),
            step(3, "agent", "delegate", is_copied_context=True),
            step(4, "user", "part"),
            step(5, "agent", "found", reasoning_content="hm"),
        ],
    )
    run = atif(
        session_id="s",
        subagent_trajectories=[helper],
        steps=[
            step(1, "system", "S"),
            step(2, "user", [{"type": "text", "text": "task"}]),
            step(
                3,
                "agent",
                "delegate",
                timestamp="2026-01-02T00:00:01Z",
                tool_calls=[{"tool_call_id": "c1", "function_name": "ask", "arguments": {"who": "helper"}}],
                observation={
                    "results": [
                        {
                            "source_call_id": "c1",
                            "content": "ok",
                            "subagent_trajectory_ref": [{"trajectory_id": "helper"}],
                        },
                        {"content": "note"},
                    ]
                },
                metrics={"prompt_token_ids": [1, 2], "completion_token_ids": [3]},
            ),
            step(4, "agent", "scripted", llm_call_count=0),
            step(5, "agent", "done"),
        ],
    )

    def test_steps_become_calls_and_sub_agents_branches(self, tmp_path):
        (run,) = read(tmp_path, self.run)
        assert (run.id, run.format) == ("s", "atif")
        assert [(call.branch, call.response["content"]) for call in run.calls] == [
            ("main", "delegate"),
            ("helper", "found"),
            ("main", "done"),
        ]
        first, helper, last = run.calls
        assert first.response["tool_calls"][0]["function"] == {"name": "ask", "arguments": {"who": "helper"}}
        assert first.timestamp_s == 1767312001.0
        assert helper.response["reasoning_content"] == "hm"
        assert roles(last) == ["system", "user", "assistant", "tool", "user", "assistant"]
        assert last.messages[3] == {"role": "tool", "content": "ok", "tool_call_id": "c1"}
        # The helper copied the opening of its parent's context: it forks from there.
        assert [call.parent for call in run.calls] == [None, 0, 0]

    def test_unreferenced_and_nested_sub_agents_come_last(self, tmp_path):
        inner = atif(trajectory_id="inner", steps=[step(1, "user", "q"), step(2, "agent", "r")])
        outer = atif(
            trajectory_id="outer",
            steps=[step(1, "user", "p"), step(2, "agent", "x")],
            subagent_trajectories=[inner],
        )
        steps = [step(1, "user", "t"), step(2, "agent", "y")]
        (run,) = read(tmp_path, atif(steps=steps, subagent_trajectories=[outer]))
        assert [call.branch for call in run.calls] == ["main", "outer", "outer/inner"]

    @pytest.mark.parametrize(
        ("steps", "problem"),
        [
            ([step(1, "robot", "t")], r"main step 1: expected source system, user, agent, got 'robot'"),
            ([step(1, "user", "t")], r"expected an agent step with a model call, got none"),
            ([step(1, "user", [{"type": "image"}]), step(2, "agent", "")], r"parts of type 'text', got 'image'"),
            (
                [step(1, "user", "t"), step(2, "agent", "", timestamp="noon")],
                r"expected an ISO 8601 .* got 'noon'",
            ),
            ([{"message": "t"}], r"Object missing required field `source` - at `\$.steps\[0\]`"),
        ],
    )
    def test_what_the_format_forbids_is_named(self, tmp_path, steps, problem):
        (error,) = read(tmp_path, atif(steps=steps))
        with pytest.raises(TraceError, match=problem):
            raise error
