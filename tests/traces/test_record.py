"""The run record: round trip, atomic replacement, a log that survives a kill, and resume."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import synthetic_run
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import HEADER, call

from jaxhybrid.errors import ReportError, TraceError
from jaxhybrid.traces import record as record_module
from jaxhybrid.traces.record import (
    CallRecord,
    ColdSample,
    CounterSample,
    MemorySample,
    RunHeader,
    RunLog,
    make_folder,
    read_json,
    write_json,
)

SAMPLE = MemorySample(t_s=4.5, bytes_by_kind={"recurrent": 7, "latent": 11}, live_sequences=2, checkpoints=3)
COLD = ColdSample(context_tokens=512, cold_ttft_s=0.7, warm_ttft_s=0.05)


def test_round_trip_keeps_every_field(tmp_path: Path) -> None:
    run = synthetic_run.run(3, 11, interrupted=True)
    path = write_json(run, tmp_path / "deep" / "report.json")
    assert read_json(path) == run
    assert msgspec.json.decode(path.read_bytes())["format_version"] == record_module.FORMAT_VERSION


@given(
    st.builds(
        call,
        trajectory=st.text(min_size=1, max_size=20),
        index=st.integers(0, 5000),
        resumed=st.integers(0, 10**6),
        gap=st.integers(0, 10**4),
        new_tokens=st.integers(0, 10**4),
        generated=st.integers(0, 10**4),
        differing=st.none() | st.tuples(*[st.integers(0, 2**31)] * 3),
        ttft_s=st.floats(0, 1e4),
        log_likelihood=st.none() | st.floats(-1e6, 0),
        limited_by=st.text(max_size=9),
    )
)
def test_any_call_round_trips(entry: CallRecord) -> None:
    line = msgspec.json.encode(entry)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=CallRecord) == entry


def test_counts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"call 3 of odd: expected prompt_tokens = resumed \+ gap \+ new_tokens"):
        msgspec.structs.replace(call("odd", 3), gap=31)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "expected a run record, got Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"format_version": 1}', "missing required field `model`"),
        (b'{"format_version": 99}', "expected a run record of format_version 1, got 99"),
        (b'{"format_version": 1, "model": "\xff"}', "got Invalid UTF-8"),
    ],
)
def test_a_broken_report_names_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as raised:
        read_json(path)
    assert str(path) in str(raised.value)


def test_a_missing_report_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.json: expected a run record, got No such file"):
        read_json(tmp_path / "nowhere.json")


def test_a_write_that_fails_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = synthetic_run.run(2, 5), synthetic_run.run(2, 6)
    path = write_json(old, tmp_path / "report.json")

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(new, path)
    assert read_json(path) == old
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_a_place_that_takes_no_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "out"
    for write in (
        lambda: make_folder(folder),
        lambda: RunLog(folder / "run.jsonl", HEADER),
        lambda: write_json(synthetic_run.run(1, 2), folder / "report.json"),
    ):
        with pytest.raises(ReportError, match=r"file/out.*: cannot be written: Not a directory"):
            write()


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run.jsonl", HEADER) as log:
        log._stream.close()
        refused = pytest.raises(ReportError, match=r"run\.jsonl: cannot be written: No space left on device")
        with Path("/dev/full").open("wb", buffering=0) as log._stream, refused:
            log.append(SAMPLE)


def test_log_gives_the_record_back(tmp_path: Path) -> None:
    run = synthetic_run.run(2, 5)
    with RunLog(tmp_path / "run.jsonl", HEADER) as log:
        for entry in (*run.calls, *run.memory, *run.cold, CounterSample(process=0, values=run.counters)):
            log.append(entry)
        kept = {"policies": run.policies, "errors": run.errors, "elapsed_s": run.elapsed_s}
        assert log.record(**kept) == run
    with RunLog(tmp_path / "run.jsonl", HEADER, resume=True) as log:
        assert log.record(**kept) == run


def test_each_entry_is_readable_before_the_log_closes(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = RunLog(path, HEADER)
    log.append(call("a", 0))
    lines = path.read_bytes().split(b"\n")
    log.close()
    assert len(lines) == 3
    assert lines[-1] == b""
    assert msgspec.json.decode(lines[1], type=CallRecord) == call("a", 0)


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_resume_after_a_kill_in_the_middle_of_a_line(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "run.jsonl"
    with RunLog(path, HEADER) as log:
        for entry in (call("a", 0), SAMPLE, COLD, call("b", 4), call("a", 1)):
            log.append(entry)
    path.write_bytes(path.read_bytes()[:-cut])
    with RunLog(path, HEADER, resume=True) as log:
        assert log.done == {("a", 0), ("b", 4)}
        assert (log.memory, log.cold) == ([SAMPLE], [COLD])
        log.append(COLD)  # shorter than what is left of the line that was cut off
    assert path.read_bytes().endswith(b"}\n")
    with RunLog(path, HEADER, resume=True) as log:
        assert log.done == {("a", 0), ("b", 4)}
        assert log.cold == [COLD, COLD]


def test_resume_goes_on_with_the_clock(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run.jsonl", HEADER) as log:
        assert log.elapsed_s == 0.0
        log.append(call("a", 2, started_s=3.0, ttft_s=0.25, decode_s=0.5))
        assert log.elapsed_s == 3.75
        log.append(SAMPLE)
        assert log.elapsed_s == 4.5


def test_counters_of_all_processes_add_up(tmp_path: Path) -> None:
    def counters(log: RunLog, **values: int) -> None:
        log.append(CounterSample(process=log.process, values=values))

    path = tmp_path / "run.jsonl"
    with RunLog(path, HEADER) as log:
        assert log.counters == {}
        counters(log, calls=2, forks=1, free_pages=70)
        counters(log, calls=5, forks=1, free_pages=60)  # in place of the one before
        assert log.counters == {"calls": 5, "forks": 1, "free_pages": 60}
    with RunLog(path, HEADER, resume=True) as log:
        assert log.counters == {"calls": 5, "forks": 1, "free_pages": 60}
        counters(log, calls=3, checkpoints_every=4, free_pages=90)
        assert log.record().counters == {"calls": 8, "forks": 1, "checkpoints_every": 4, "free_pages": 90}
    with RunLog(path, HEADER, resume=True) as log:
        counters(log, calls=1, free_pages=80)
        assert log.counters == {"calls": 9, "forks": 1, "checkpoints_every": 4, "free_pages": 80}


def test_without_resume_the_log_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLog(path, HEADER) as log:
        log.append(call("a", 0))
    with RunLog(path, HEADER) as log:
        assert log.done == frozenset()
    with RunLog(path, HEADER, resume=True) as log:
        assert log.done == frozenset()


@pytest.mark.parametrize("content", [b"", b'{"type":"header","mod'])
def test_resume_of_a_run_that_wrote_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with RunLog(path, HEADER, resume=True) as log:
        log.append(call("a", 0))
    with RunLog(path, HEADER, resume=True) as log:
        assert log.done == {("a", 0)}


def test_resume_without_a_log_starts_one(tmp_path: Path) -> None:
    with RunLog(tmp_path / "new" / "run.jsonl", HEADER, resume=True) as log:
        assert log.done == frozenset()


def test_resume_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLog(path, HEADER) as log:
        log.append(call("a", 0))
    before = path.read_bytes()
    other = RunHeader(model="other", mode="score", traces=HEADER.traces)
    with pytest.raises(
        TraceError, match=r"run\.jsonl:1: can't resume another run: expected model='other', mode='score'"
    ):
        RunLog(path, other, resume=True)
    options = RunHeader(model=HEADER.model, mode=HEADER.mode, traces=HEADER.traces, options={"max_tokens": "64"})
    with pytest.raises(TraceError, match=r"another run: expected max_tokens='64', got max_tokens=None$"):
        RunLog(path, options, resume=True)
    assert path.read_bytes() == before


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLog(path, HEADER) as log:
        log.append(call("a", 0))
        log.append(call("a", 1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"type":"call","trajectory":3}\n', *lines[2:]]))
    with pytest.raises(TraceError, match=r"run\.jsonl:3: expected a run record, got .*trajectory"):
        RunLog(path, HEADER, resume=True)
