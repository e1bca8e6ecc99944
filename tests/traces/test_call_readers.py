"""Readers of formats that record calls without messages: flattened text, block hashes, token counts."""

import json

import pytest

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.recognise import read_file


def read(tmp_path, value, name="trace.jsonl"):
    file = tmp_path / name
    file.write_text("\n".join(map(json.dumps, value)) if name.endswith(".jsonl") else json.dumps(value))
    return list(read_file(file))


def raises(error, problem):
    with pytest.raises(TraceError, match=problem):
        raise error


class TestCallLog:
    def test_sessions_in_order_of_time(self, tmp_path):
        def row(session, microseconds, text):
            return {"timestamp": microseconds, "input": text, "output": text[-1:], "session_id": session}

        opening = "a" * 70
        rows = [row("s", 3e6, opening + "bc"), row("t", 9e6, "z"), row("s", 1e6, opening), row("s", 2e6, "")]
        error, s, t = read(tmp_path, rows)
        raises(error, r"trace.jsonl:4: expected a prompt, got an empty input")
        assert (s.id, s.format, s.source) == ("s", "call_log", f"{tmp_path / 'trace.jsonl'}:3")
        assert [(call.text, call.response_text, call.timestamp_s) for call in s.calls] == [
            (opening, "a", 1.0),
            (opening + "bc", "c", 3.0),
        ]
        assert [call.parent for call in s.calls] == [None, 0]
        assert t.id == "t"

    def test_a_field_of_another_type_is_named(self, tmp_path):
        row = {"timestamp": 1, "input": 5, "output": "", "session_id": "s"}
        (error,) = read(tmp_path, [row])
        raises(error, r"trace.jsonl:1: Expected `str`, got `int` - at `\$.input`")


class TestWeka:
    @staticmethod
    def request(t, length, hashes, kind="n", out=3):
        return {"t": t, "type": kind, "model": "m", "in": length, "out": out, "hash_ids": hashes, "stop": "tool_use"}

    def session(self, *requests, **rest):
        return {"id": "trace_7", "block_size": 4, "tool_tokens": 1, "requests": list(requests), **rest}

    def test_sub_agents_start_before_their_entry_and_interleave(self, tmp_path):
        nested = {
            "type": "subagent",
            "agent_id": "deep",
            "t": 2.5,
            "duration_ms": 500,
            "requests": [self.request(0, 4, [8])],
        }
        helper = {
            "type": "subagent",
            "agent_id": "helper",
            "t": 14.0,
            "duration_ms": 4000,
            "requests": [self.request(0, 9, [1, 5]), nested, self.request(3.5, 13, [1, 5, 6], "s")],
        }
        main = [self.request(0, 10, [1, 2]), helper, self.request(13, 14, [1, 2, 3])]
        (run,) = read(tmp_path, self.session(*main), "trace.json")
        assert (run.id, run.format, run.scope) == ("trace_7", "weka", "weka/trace_7")
        assert [(call.timestamp_s, call.branch, call.parent) for call in run.calls] == [
            (0.0, "main", None),
            (10.0, "helper", 0),
            (12.0, "helper/deep", None),
            (13.0, "main", 0),
            (13.5, "helper", 1),
        ]
        last = run.calls[-1]
        assert (last.blocks.tolist(), last.block_size, last.input_length, last.output_length) == ([1, 5, 6], 4, 13, 3)

    def test_a_global_scope_is_shared_by_sessions(self, tmp_path):
        (run,) = read(tmp_path, self.session(self.request(0, 4, [1]), hash_id_scope="global"), "trace.json")
        assert run.scope == "weka"

    @pytest.mark.parametrize(
        ("request_", "problem"),
        [
            ({"type": "x", "t": 0}, r"main request 0: expected hash_ids or requests, got neither \(type 'x'\)"),
            ({"type": "n", "in": 4, "hash_ids": [1, 2]}, r"at most 1 hashes for 4 tokens in blocks of 4, got 2"),
            ({"type": "n", "in": 0, "hash_ids": []}, r"expected an input of 1 to 16777216 tokens .* got 0 and 0"),
            (
                {"type": "n", "in": 4, "hash_ids": ["a"]},
                r"Expected `int`, got `str` - at `\$.requests\[0\].hash_ids\[0\]`",
            ),
        ],
    )
    def test_what_cannot_be_a_request_is_named(self, tmp_path, request_, problem):
        (error,) = read(tmp_path, self.session(request_), "trace.json")
        raises(error, problem)


class TestMooncake:
    @staticmethod
    def row(length, hashes, milliseconds=0):
        return {"timestamp": milliseconds, "input_length": length, "output_length": 9, "hash_ids": hashes}

    def test_requests_join_by_more_than_the_system_prompt(self, tmp_path):
        rows = [
            self.row(1100, [0, 1, 2]),
            self.row(900, [0, 7], 1500),
            self.row(1700, [0, 1, 3, 4], 2000),
            self.row(600, [9]),
            self.row(1600, [0, 1, 3, 5], 3000),
        ]
        first, second, error = sorted(read(tmp_path, rows), key=lambda item: isinstance(item, TraceError))
        raises(error, r"trace.jsonl:4: expected 2 hashes for 600 tokens in blocks of 512, got 1")
        assert (first.id, second.id) == ("trace", "trace:2")
        assert [call.input_length for call in first.calls] == [1100, 1700, 1600]
        assert [call.parent for call in first.calls] == [None, 0, 1]
        assert second.calls[0].timestamp_s == 1.5
        assert first.scope == second.scope == "mooncake/trace.jsonl"


class TestTraceLab:
    @staticmethod
    def round(index, total, prefix, out=5, session="s"):
        return {
            "session_id": session,
            "round_index": index,
            "input_tokens_total": total,
            "prefix_tokens": prefix,
            "output_tokens": out,
            "timing_events": [{"event_type": "user_message", "timestamp": "1970-01-01T00:00:02Z"}],
        }

    def test_a_prompt_with_room_for_the_context_before_goes_on_from_all_of_it(self, tmp_path):
        rows = [self.round(1, 20, 8), self.round(0, 10, 4), self.round(2, 8, 0)]
        (run,) = read(tmp_path, rows)
        assert (run.id, run.format) == ("s", "tracelab")
        first, second, third = (call.blocks.tolist() for call in run.calls)
        assert first == list(range(10))  # what an earlier session left in the provider's cache is new to this one
        assert second == list(range(20))  # prompt, response and 5 new: the hit ended where the provider's cache did
        assert set(third).isdisjoint(second)
        assert [call.parent for call in run.calls] == [None, 0, None]
        assert run.calls[0].timestamp_s == 2.0

    def test_a_shorter_prompt_dropped_what_followed_an_earlier_one(self, tmp_path):
        rows = [self.round(0, 300, 0, 50), self.round(1, 400, 256, 60), self.round(2, 430, 256, 70)]
        (run,) = read(tmp_path, rows)
        first, second, third = (call.blocks.tolist() for call in run.calls)
        assert second == list(range(400))
        assert third[:300] == first  # not the 256 whole blocks of it that the provider counts
        assert set(third[300:]).isdisjoint(second)
        assert [call.parent for call in run.calls] == [None, 0, 1]
        rows[2] = self.round(2, 430, 128, 70)  # a block further off: the hit is all that is known
        (run,) = read(tmp_path, rows)
        assert run.calls[2].blocks.tolist()[:129] == [*range(128), 460]

    def test_a_hit_longer_than_the_latest_context_is_of_an_earlier_one(self, tmp_path):
        rows = [self.round(0, 300, 0, 50), self.round(1, 40, 0), self.round(2, 360, 256)]
        (run,) = read(tmp_path, rows)
        assert [call.parent for call in run.calls] == [None, None, 0]
        assert run.calls[2].blocks.tolist()[:351] == [*range(350), 395]

    def test_counts_that_a_provider_leaves_out_are_none(self, tmp_path):
        row = self.round(0, 10, None) | {"output_tokens": None, "timing_events": None}
        (run,) = read(tmp_path, [row])
        assert (run.calls[0].input_length, run.calls[0].output_length, run.calls[0].timestamp_s) == (10, 0, None)

    @pytest.mark.parametrize(
        ("total", "prefix", "problem"),
        [
            (10, 11, r"expected prefix_tokens within 10 input tokens, got 11"),
            (10**12, 0, r"expected an input of 1 to 16777216 tokens"),
        ],
    )
    def test_impossible_counts_are_named(self, tmp_path, total, prefix, problem):
        (error,) = read(tmp_path, [self.round(0, total, prefix)])
        raises(error, problem)
