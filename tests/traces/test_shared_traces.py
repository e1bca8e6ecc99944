"""The recorded traces kept beside the checkout: every file is read, and what is known of them holds."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer

from jaxhybrid.engine.lineage import common_prefix
from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import find_files
from jaxhybrid.traces.recognise import read_file
from jaxhybrid.traces.tokenise import tokenise
from jaxhybrid.traces.trajectory import BlockCall, Trajectory

SHARED = Path(os.environ.get("JAXHYBRID_SHARED", Path(__file__).resolve().parents[2] / "../shared"))
TRACES = SHARED / "traces"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not TRACES.is_dir(), reason=f"no recorded traces at {TRACES}"),
]


class WideTokenizer(ByteTokenizer):
    vocab_size = 8192


def read(folder):
    """Trajectories and errors of the files in a folder."""
    items = [item for file in find_files([TRACES / folder]) for item in read_file(file)]
    return [i for i in items if isinstance(i, Trajectory)], [i for i in items if isinstance(i, TraceError)]


@pytest.mark.parametrize(
    ("folder", "format", "trajectories", "calls"),
    [
        ("mini-swe-agent", "openai_chat", 12, 588),
        ("mini-swe-agent-raw", "openai_chat", 1, 31),
        ("tau-bench", "tau_bench", 149, 2036),
        ("swe-agent", "swe_agent", 11, 118),
        ("lmcache-agent-trace/miniswe", "call_log", 3, 90),
        ("lmcache-agent-trace/taubench", "call_log", 3, 75),
        ("weka", "weka", 9, 388),
    ],
)
def test_every_call_is_read(folder, format, trajectories, calls):
    runs, errors = read(folder)
    assert errors == []
    assert {run.format for run in runs} == {format}
    assert (len(runs), sum(len(run.calls) for run in runs)) == (trajectories, calls)


def test_mini_swe_agent_only_appends():
    runs, _ = read("mini-swe-agent")
    assert sorted(len(run.calls) for run in runs) == [31, 36, 38, 46, 49, 51, 53, 54, 56, 57, 58, 59]
    for run in runs:
        assert [call.parent for call in run.calls] == [None, *range(len(run.calls) - 1)]
        assert all(later.timestamp_s >= call.timestamp_s for call, later in pairwise(run.calls))
        result = tokenise(run, ByteTokenizer())
        for call, later in pairwise(result.calls):
            context = np.concatenate([call.prompt_ids, call.response_ids])
            np.testing.assert_array_equal(later.prompt_ids[: len(context)], context)


def test_the_raw_record_gives_the_same_calls():
    (raw,), _ = read("mini-swe-agent-raw")
    same = next(run for run in read("mini-swe-agent")[0] if run.id == raw.id)
    assert [call.response for call in raw.calls] == [call.response for call in same.calls]
    assert [call.timestamp_s for call in raw.calls] == [call.timestamp_s for call in same.calls]


def test_tau_bench_trials_share_their_prompt():
    runs = [run for run in read("tau-bench")[0] if "-trial" in run.id]
    tasks = {}
    for run in runs:
        tasks.setdefault(run.id.partition("-trial")[0], []).append(run)
    assert (len(tasks), {len(trials) for trials in tasks.values()}) == (20, {4})
    for trials in tasks.values():
        assert len({trial.calls[0].messages[0]["content"] for trial in trials}) == 1


def test_half_of_magagents_calls_do_not_extend_the_one_before():
    runs, errors = read("lmcache-agent-trace/magagent")
    assert len(errors) == 3
    assert all("expected a prompt, got an empty input" in str(error) for error in errors)
    pairs = [pair for run in runs for pair in pairwise(run.calls)]
    extending = sum(later.text.startswith(call.text) for call, later in pairs)
    assert len(pairs) == 88
    assert 0.25 < extending / len(pairs) < 0.5


def test_weka_sessions_nest_sub_agents_and_tokens_follow_the_blocks():
    runs, _ = read("weka")
    branches = {run.id: len({call.branch for call in run.calls}) - 1 for run in runs}
    assert {id: n for id, n in branches.items() if n} == {"trace_0014": 1, "trace_0277": 4, "trace_0282": 3}
    kept = []
    for run in runs:
        tokens = tokenise(run, WideTokenizer()).calls
        continued = set()
        for call, made in zip(run.calls, tokens, strict=True):
            assert isinstance(call, BlockCall)
            assert (len(made.prompt_ids), len(made.response_ids)) == (call.input_length, call.output_length)
            assert len(call.blocks) == call.input_length // call.block_size
            if call.parent is None:
                continue
            parent, before = run.calls[call.parent], tokens[call.parent]
            shared = shared_blocks(call, parent)
            np.testing.assert_array_equal(made.prompt_ids[: shared * 64], before.prompt_ids[: shared * 64])
            if shared == len(parent.blocks) and call.parent not in continued:
                continued.add(call.parent)
                context = np.concatenate([before.prompt_ids, before.response_ids])
                kept.append(len(made.prompt_ids) >= len(context))
                assert np.array_equal(made.prompt_ids[: len(context)], context) == kept[-1]
    # In 9 of 10 calls that extend an earlier one there is room for its whole response.
    assert len(kept) > 300
    assert 0.88 < np.mean(kept) < 0.95


def shared_blocks(call, parent):
    length = min(len(call.blocks), len(parent.blocks))
    return int(np.argmin(np.append(call.blocks[:length] == parent.blocks[:length], False)))


def test_mooncake_requests_form_conversations():
    runs, errors = read("mooncake")
    assert errors == []
    assert sum(len(run.calls) for run in runs) == 12031
    assert len(runs) == 7373
    assert sum(call.parent is None for run in runs for call in run.calls) == len(runs)
    long = max(runs, key=lambda run: len(run.calls))
    first, second = tokenise(long, WideTokenizer()).calls[:2]
    np.testing.assert_array_equal(second.prompt_ids[: len(first.prompt_ids)], first.prompt_ids)


def test_tracelab_is_read_or_reported():
    runs, errors = read("tracelab")
    assert [len(run.calls) for run in runs] == [10, 9, 10, 9]
    assert sorted(str(error).rpartition("example_sessions/")[2].partition(":")[0] for error in errors) == [
        "claude/trace.json",
        "codex/trace.json",
        "derived/round_trace.expanded.json",
        "sanitized/round_trace.expanded.json",
    ]
    assert all(":1: expected JSON" in str(error) for error in errors)


def test_tracelab_sessions_append_but_where_a_user_turn_drops_reasoning():
    for run in read("tracelab")[0]:
        tokens = tokenise(run, WideTokenizer()).calls
        assert [call.parent for call in run.calls] == [None, *range(len(run.calls) - 1)]
        cut = []
        for number, (call, later) in enumerate(pairwise(tokens), start=1):
            context = np.concatenate([call.prompt_ids, call.response_ids])
            if not np.array_equal(later.prompt_ids[: len(context)], context):
                cut.append((number, common_prefix(later.prompt_ids, context)))
        # What they go back to is the end of the prompt that began the user's turn before.
        first, sixth = len(tokens[0].prompt_ids), len(tokens[5].prompt_ids)
        assert cut == ([(5, first), (7, sixth)] if run.id.startswith("codex") else [])


def test_every_trajectory_becomes_tokens():
    files = [file for file in find_files([TRACES]) if file.parent.name not in ("mooncake", "mini-swe-agent")]
    runs = [item for file in files for item in read_file(file) if isinstance(item, Trajectory)]
    assert len(runs) == 183  # 1 raw, 149 tau-bench, 11 SWE-agent, 9 LMCache, 9 Weka, 4 TraceLab
    for run in runs:
        result = tokenise(run, WideTokenizer())
        assert len(result.calls) == len(run.calls)
        assert all(len(call.prompt_ids) > 0 for call in result.calls)
