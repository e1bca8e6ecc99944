"""The main job from end to end, on a tiny model: what it records, skips, refuses, and does on Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from chat_runs import conversation, write_runs

from jaxhybrid.traces.job import INTERRUPTED, ReplayJob, run_job
from jaxhybrid.traces.record import RunRecord, read_json

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("JAXHYBRID_SHARED", ROOT / "../shared"))
SCRIPT = ROOT / "scripts" / "replay_traces.py"

RUNS = [conversation("a", 4), conversation("b", 3), conversation("c", 2), conversation("d", 3)]
PAIRS = {(run["id"], call) for run in RUNS for call in range(len(run["messages"]) // 2 - 1)}


@pytest.fixture(scope="session")
def base(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ReplayJob:
    traces = write_runs(tmp_path_factory.mktemp("traces") / "runs.jsonl", RUNS)
    return ReplayJob(
        traces=(str(traces),), model=str(chat_folder), max_sequences=4, max_tokens=2048, max_checkpoints=64
    )


@pytest.fixture(scope="session")
def forced(base: ReplayJob, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return run(base, tmp_path_factory.mktemp("forced"))


def run(job: ReplayJob, out: Path, status: int = 0, **changes) -> RunRecord:
    assert run_job(replace(job, out=str(out), **changes)) == status
    assert (out / "report.html").read_text().rstrip().endswith("</html>")
    return read_json(out / "report.json")


def pairs(record: RunRecord) -> list[tuple[str, int]]:
    return [(call.trajectory, call.call) for call in record.calls]


def refusal(job: ReplayJob, capsys: pytest.CaptureFixture[str], out: Path) -> str:
    assert run_job(replace(job, out=str(out))) == 1
    assert not (out / "report.json").exists()
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_every_call_is_replayed_once_and_the_numbers_add_up(forced: RunRecord):
    assert set(pairs(forced)) == PAIRS
    assert len(forced.calls) == len(PAIRS)
    assert (forced.errors, forced.interrupted) == ((), False)
    for name, counter in (
        ("prompt_tokens", "prompt_tokens"), ("resumed", "reused_tokens"), ("gap", "gap_tokens"),
        ("new_tokens", "new_tokens"), ("generated", "generated_tokens"),
    ):  # fmt: skip
        assert sum(getattr(call, name) for call in forced.calls) == forced.counters[counter], name
    assert forced.counters["calls"] == len(PAIRS)
    for call in forced.calls:
        assert call.prompt_tokens == call.resumed + call.gap + call.new_tokens
        assert call.context_tokens == call.prompt_tokens + call.generated
        assert call.generated > 0
        assert call.ttft_s > 0
        assert call.decode_s > 0
    # The engine keeps what the study's policy of the same name keeps.
    studied = next(result for result in forced.policies if result.policy == "+ every 1024")
    assert studied.calls == len(PAIRS)
    assert studied.prompt_tokens == forced.counters["prompt_tokens"]
    assert studied.generated_tokens == forced.counters["generated_tokens"]
    assert studied.gap_tokens == forced.counters["gap_tokens"]


def test_later_calls_recompute_nothing_and_time_to_first_token_holds_no_compilation(forced: RunRecord):
    later = [call for call in forced.calls if call.parent is not None]
    assert len(later) == len(PAIRS) - len(RUNS)
    assert {(call.gap, call.limited_by) for call in later} == {(0, "none")}
    assert max(call.ttft_s for call in forced.calls) < 1


def test_scoring_in_chunks_gives_the_likelihoods_of_the_decode_loop(base: ReplayJob, forced: RunRecord, tmp_path: Path):
    scored = run(base, tmp_path, mode="score")
    expected = {(call.trajectory, call.call): call.log_likelihood for call in forced.calls}
    assert {(call.trajectory, call.call): call.log_likelihood for call in scored.calls} == pytest.approx(
        expected, abs=2e-3
    )
    assert all(value is not None and value < -1 for value in expected.values())
    assert [(c.matched, c.resumed) for c in sorted(scored.calls, key=lambda c: (c.trajectory, c.call))] == [
        (c.matched, c.resumed) for c in sorted(forced.calls, key=lambda c: (c.trajectory, c.call))
    ]


def test_generation_is_greedy_and_the_same_again(base: ReplayJob, forced: RunRecord, tmp_path: Path):
    first, second = (run(base, tmp_path / name, mode="generate", max_trajectories=2) for name in "xy")
    assert set(pairs(first)) == {pair for pair in PAIRS if pair[0] in "ab"}
    assert [(c.trajectory, c.call, c.generated, c.log_likelihood, c.gap) for c in first.calls] == [
        (c.trajectory, c.call, c.generated, c.log_likelihood, c.gap) for c in second.calls
    ]
    recorded = {(c.trajectory, c.call): c.generated for c in forced.calls}
    for call in first.calls:
        assert 0 <= call.generated <= recorded[call.trajectory, call.call]
    # It is the recorded response that follows, not what the model said; no template is to blame.
    assert {call.limited_by for call in first.calls if call.parent is not None} == {"replaced"}


def test_stripped_reasoning_is_shown_and_a_switch_preserves_it(base: ReplayJob, tmp_path: Path):
    thinking = conversation("thinking", 3)
    for message in thinking["messages"]:
        if message["role"] == "assistant":
            message["reasoning_content"] = "open the test file and fix the error in that line"
    thinking["messages"][5] = {"role": "user", "content": "now fix the table"}  # where the second result was
    file = write_runs(tmp_path / "runs.jsonl", [thinking])
    stripped, kept, answered = (
        run(base, tmp_path / name, mode=mode, traces=(str(file),), switches=switches)
        for name, mode, switches in (
            ("stripped", "score", "{}"),
            ("kept", "score", '{"preserve_thinking": true}'),
            ("answered", "generate", "{}"),
        )
    )
    first, second, third = stripped.calls
    assert (second.limited_by, third.limited_by) == ("none", "template")
    position, expected, got = third.differing or (0, 0, 0)
    assert first.prompt_tokens <= position < first.context_tokens
    assert third.matched == position
    assert expected != got
    assert [call.limited_by for call in kept.calls] == ["cold", "none", "none"]
    assert [call.limited_by for call in answered.calls] == ["cold", "replaced", "template"]
    assert kept.options["switches"] == '{"preserve_thinking": true}'
    assert kept.calls[2].resumed > third.resumed
    assert "preserve_thinking" in (tmp_path / "kept" / "report.html").read_text()


def test_shards_are_a_partition_and_a_maximum_is_kept(base: ReplayJob, tmp_path: Path):
    halves = [run(base, tmp_path / str(i), mode="score", shard=f"{i}/2") for i in range(2)]
    assert [{trajectory for trajectory, _ in pairs(half)} for half in halves] == [{"a", "c"}, {"b", "d"}]
    assert set(pairs(halves[0])) | set(pairs(halves[1])) == PAIRS
    one = run(base, tmp_path / "one", simulate=True, max_trajectories=1)
    assert {result.calls for result in one.policies} == {4}


def test_broken_lines_are_named_and_skipped(base: ReplayJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "mixed.jsonl"
    lines = [json.dumps(RUNS[2]), '{"messages": [', '{"messages": [{"role": "user"', json.dumps(RUNS[3])]
    file.write_text("\n".join(lines) + "\n")
    record = run(base, tmp_path / "out", mode="score", traces=(str(file),))
    assert {trajectory for trajectory, _ in pairs(record)} == {"c", "d"}
    assert [error.split(": ")[0] for error in record.errors] == [f"{file}:2", f"{file}:3"]
    printed = capsys.readouterr().out.replace("\n", "")
    assert f"skipped {file}:2: expected JSON" in printed


def test_text_that_is_no_text_is_skipped(base: ReplayJob, tmp_path: Path):
    broken = json.loads(json.dumps(RUNS[2]))
    broken["messages"][1]["content"] = "half a pair: \ud800"
    file = write_runs(tmp_path / "runs.jsonl", [broken | {"id": "broken"}, RUNS[2]])
    record = run(base, tmp_path / "out", simulate=True, traces=(str(file),))
    assert record.policies[0].calls == 2
    (error,) = record.errors
    assert error.startswith(f"{file}:1: ")
    assert "expected Unicode text" in error


def test_what_cannot_begin_is_refused(base: ReplayJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n[\n")
    no_tokenizer, no_config = tmp_path / "no_tokenizer", tmp_path / "no_config"
    for folder, kept in ((no_tokenizer, "config.json"), (no_config, "tokenizer.json")):
        folder.mkdir()
        for file in Path(base.model or "").iterdir():
            if file.name == kept or file.suffix == ".safetensors":
                (folder / file.name).symlink_to(file)
    cases = {
        r"no trajectory in 1 file, 2 errors; the first: .*broken\.jsonl:1: expected JSON": {"traces": (str(broken),)},
        r"missing: no such file or folder": {"traces": (str(tmp_path / "missing"),)},
        r"unknown trace format 'sharegpt': expected one of .*openai_chat": {"format": "sharegpt"},
        r"expected a shard i/n with 0 <= i < n, got '3'": {"shard": "3"},
        r"expected a shard i/n with 0 <= i < n, got 2/2": {"shard": "2/2"},
        r"--switches: expected a JSON object, got '\{'": {"switches": "{"},
        r"--switches: expected a JSON object, got '\[1\]'": {"switches": "[1]"},
        r"no_tokenizer: expected a file tokenizer\.json": {"model": str(no_tokenizer)},
        r"no_config.*config\.json": {"model": str(no_config)},
        r"nowhere": {"model": str(tmp_path / "nowhere")},
    }
    for message, changes in cases.items():
        with pytest.raises(AssertionError, match=message):  # of the regular expression on one line
            raise AssertionError(refusal(replace(base, mode="score", **changes), capsys, tmp_path / "out"))
    (tmp_path / "file").write_text("")
    for simulate in (False, True):
        error = refusal(replace(base, mode="score", simulate=simulate), capsys, tmp_path / "file" / "out")
        assert error == f"error: {tmp_path / 'file' / 'out'}: cannot be written: Not a directory\n"


def test_calls_that_do_not_fit_are_named_and_the_others_go_on(base: ReplayJob, tmp_path: Path):
    long = conversation("long", 5, words=150)  # more than the pool holds from its third call on
    file = write_runs(tmp_path / "runs.jsonl", [RUNS[0], long, RUNS[3]])
    record = run(base, tmp_path / "out", mode="score", traces=(str(file),))
    fit = [pair for pair in pairs(record) if pair[0] == "long"]
    assert fit == [("long", call) for call in range(len(fit))]
    assert 1 <= len(fit) <= 3
    assert set(pairs(record)) - set(fit) == {pair for pair in PAIRS if pair[0] in "ad"}
    assert len(record.errors) == 5 - len(fit)
    for number, error in enumerate(record.errors, start=len(fit)):
        assert error.startswith(f"{file}:2: call {number} of long: ")
        assert f"max_context={base.max_tokens}" in error or f"the {base.max_tokens} that one sequence" in error


def test_a_run_that_was_stopped_resumes_and_no_other(
    base: ReplayJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    whole = run(base, out, mode="score")
    report = (out / "report.json").read_bytes()
    lines = (out / "run.jsonl").read_text().splitlines(keepends=True)
    calls = [number for number, line in enumerate(lines) if '"type":"call"' in line]
    (out / "run.jsonl").write_text("".join(lines[: calls[7]]))  # as a kill after the seventh call leaves it
    for changes in (
        {"mode": "forced"},
        {"switches": '{"enable_thinking": false}'},
        {"shard": "0/2"},
        {"max_trajectories": 2},
        {"max_tokens": 4096},
        {"splice": False},
    ):
        job = replace(base, out=str(out), resume=True, **({"mode": "score"} | changes))
        assert run_job(job) == 1
        error = capsys.readouterr().err
        assert "can't resume another run: expected" in error
        assert next(iter(changes)) in error
    traces = [Path(path) for path in base.traces]
    before = [path.read_text() for path in traces]
    traces[0].write_text(before[0] + "\n")
    assert run_job(replace(base, out=str(out), resume=True, mode="score")) == 1
    assert "contents" in capsys.readouterr().err
    traces[0].write_text(before[0])
    assert (out / "report.json").read_bytes() == report
    log = (out / "run.jsonl").read_text()
    assert log.count('"type":"call"') == 7
    resumed = run(base, out, mode="score", resume=True)
    assert sorted(pairs(resumed)) == sorted(PAIRS)
    assert (out / "run.jsonl").read_text().startswith(log)
    assert resumed.options == whole.options
    assert resumed.counters["calls"] <= len(PAIRS)
    assert capsys.readouterr().out.count(f"{len(PAIRS)}/{len(PAIRS)} calls") == 1


def test_a_shard_without_trajectories_says_so(base: ReplayJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(base, tmp_path, simulate=True, shard="9/10")
    assert "none of the trajectories is in shard 9/10" in capsys.readouterr().out


def start(base: ReplayJob, traces: Path, out: Path) -> subprocess.Popen[str]:
    """The script in a process of its own, with more to do than it can before it is stopped."""
    command = [
        sys.executable, str(SCRIPT), f"--traces={traces}", f"--model={base.model}", f"--out={out}",
        "--max_sequences=4", "--max_tokens=2048", "--max_checkpoints=64",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log, deadline = out / "run.jsonl", time.monotonic() + 60
    while not (log.exists() and log.read_text().count('"type":"call"') >= 5):
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_ctrl_c_ends_with_a_report_and_resume_goes_on(base: ReplayJob, tmp_path: Path):
    runs = [conversation(f"run-{number}", 4) for number in range(60)]
    traces, out = write_runs(tmp_path / "runs.jsonl", runs), tmp_path / "out"
    process = start(base, traces, out)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, printed
    assert "Interrupted" in printed
    record = read_json(out / "report.json")
    assert record.interrupted
    assert "Interrupted" in (out / "report.html").read_text()
    assert 5 <= len(record.calls) < 240
    assert record.errors == ()

    resumed = run(base, out, traces=(str(traces),), resume=True)
    assert not resumed.interrupted
    assert sorted(pairs(resumed)) == sorted((each["id"], call) for each in runs for call in range(4))
    assert resumed.calls[: len(record.calls)] == record.calls
    for part in (record, resumed):  # counters are of all processes that a run took
        assert part.counters["calls"] == len(part.calls)
        assert part.counters["generated_tokens"] == sum(call.generated for call in part.calls)
        assert part.counters["prompt_tokens"] == sum(call.prompt_tokens for call in part.calls)
    assert resumed.counters["decode_dispatches"] > record.counters["decode_dispatches"]


def test_a_second_ctrl_c_ends_the_program(base: ReplayJob, tmp_path: Path):
    traces = write_runs(tmp_path / "runs.jsonl", [conversation(f"run-{number}", 4) for number in range(60)])
    process = start(base, traces, tmp_path / "out")
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, INTERRUPTED)
    # Either it was stopped at once, or it had its report written when the second came.
    assert "KeyboardInterrupt" in printed or (tmp_path / "out" / "report.json").exists()
    assert (tmp_path / "out" / "run.jsonl").read_bytes().endswith(b"\n")


@pytest.mark.shared
def test_the_command_for_the_weka_table_gives_the_published_figures(tmp_path: Path):
    from test_simulate import NINE_SESSIONS, PUBLISHED

    sessions = SHARED / "traces" / "weka"
    if not sessions.is_dir():
        pytest.skip(f"no recorded sessions in {sessions}")
    command = ["--simulate", f"--traces={sessions}", "--study_block_size=64", "--noshared_cache", f"--out={tmp_path}"]
    subprocess.run([sys.executable, str(SCRIPT), *command], check=True, stdout=subprocess.DEVNULL)
    extra = {result.policy: result.extra_prefill for result in read_json(tmp_path / "report.json").policies}
    assert {name: extra[name] for name in NINE_SESSIONS} == pytest.approx(NINE_SESSIONS, abs=1e-5)
    for grid in (512, 1024, 1600, 4096):
        assert extra[f"grid {grid}"] == pytest.approx(PUBLISHED[f"grid {grid}"], rel=0.15)
    assert extra["+ every 1024"] < min(extra[name] for name in PUBLISHED)


# Runs the script in this process and prints the most memory it ever held, in kB.
PEAK = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_replaying_28k_tokens_takes_less_than_2_gb(tmp_path: Path):
    traces = SHARED / "traces" / "mini-swe-agent" / "pydicom__pydicom-1256.json"
    if not traces.exists():
        pytest.skip(f"no recorded run at {traces}")
    result = subprocess.run(
        [sys.executable, "-c", PEAK, str(SCRIPT), f"--traces={traces}", f"--out={tmp_path}"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    record = read_json(tmp_path / "report.json")
    assert record.errors == ()
    assert max(call.context_tokens for call in record.calls) > 28_000
    peak_gb = int(result.stdout.split()[-1]) * 1024 / 1e9
    assert peak_gb < 2
