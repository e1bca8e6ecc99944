"""The main job: read traces, replay or simulate them, report."""

import itertools
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from rich.console import Console

from jaxhybrid.chat import ChatTokenizer
from jaxhybrid.errors import JaxHybridError, TraceError
from jaxhybrid.traces.pipeline import Shard, read_traces, tokenise_traces
from jaxhybrid.traces.progress import Progress
from jaxhybrid.traces.record import RunHeader, RunLog, RunRecord
from jaxhybrid.traces.report_html import write_report
from jaxhybrid.traces.report_table import print_table
from jaxhybrid.traces.simulate import Study
from jaxhybrid.traces.trajectory import TokenTrajectory, Trajectory

DEMO_MODEL = "demo"
PREFILL_CHUNKS = (64, 512)  # few programs: a short run spends longer compiling than padding costs it


@dataclass(frozen=True)
class ReplayJob:
    """What the command line asks for; see scripts/replay_traces.py for each."""

    traces: tuple[str, ...] = ()
    model: str | None = None
    mode: Literal["forced", "score", "generate"] = "forced"
    out: str = "replay-report"
    format: str | None = None
    max_trajectories: int | None = None
    simulate: bool = False
    shared_cache: bool = True
    shard: str = "0/1"
    resume: bool = False
    splice: bool = True
    switches: str = "{}"
    max_sequences: int = 8
    max_tokens: int = 131072
    max_checkpoints: int = 256
    compilation_cache: str | None = None

    @property
    def model_folder(self) -> Path:
        return Path(self.model) if self.model else demo_folder()

    @property
    def trace_paths(self) -> tuple[str, ...]:
        return self.traces or (str(demo_folder() / "traces"),)

    @property
    def header(self) -> RunHeader:
        """What must be the same for a run to be resumed."""
        traces = self.traces or ("the project's own recordings",)
        mode = "simulate" if self.simulate else self.mode
        return RunHeader(model=self.model or DEMO_MODEL, mode=mode, traces=traces)


def demo_folder() -> Path:
    """The embedded demo model: a checkpoint folder like any other, with recorded trajectories in `traces`."""
    return Path(str(resources.files("jaxhybrid") / "demo"))


class Interrupt:
    """The first Ctrl-C asks for an orderly end; the second is an ordinary KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)


def run_job(job: ReplayJob) -> int:
    """Runs to the end or to Ctrl-C, and writes the report. Returns the exit status: 1 if nothing could be done."""
    console = Console()
    try:
        with Interrupt() as interrupt:
            record = _simulate(job, console, interrupt) if job.simulate else _replay(job, console, interrupt)
    except JaxHybridError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    paths = write_report(record, Path(job.out))
    print_table(record, console)
    console.print(f"report: {paths.html}", soft_wrap=True)
    console.print(f"data:   {paths.json}", soft_wrap=True)
    nothing = not record.calls and not any(result.calls for result in record.policies)
    return 1 if nothing and record.errors else 0


def _switches(job: ReplayJob) -> Mapping[str, Any]:
    try:
        switches = json.loads(job.switches)
    except ValueError as error:
        raise TraceError(f"--switches: expected a JSON object, got {job.switches!r}: {error}") from error
    if not isinstance(switches, dict):
        raise TraceError(f"--switches: expected a JSON object, got {job.switches!r}")
    return switches


def _trajectories(job: ReplayJob, tokenizer: ChatTokenizer) -> Iterator[TokenTrajectory | TraceError]:
    """Tokenised lazily, and no more trajectories than asked for."""
    read = read_traces(job.trace_paths, format=job.format, shard=Shard.parse(job.shard))
    left = job.max_trajectories
    for item in tokenise_traces(read, tokenizer, _switches(job)):
        yield item
        if left is not None and isinstance(item, TokenTrajectory):
            left -= 1
            if not left:
                return


def _count_calls(job: ReplayJob) -> int:
    """Calls of the trajectories to come; reading is cheap beside tokenising and replaying."""
    read = read_traces(job.trace_paths, format=job.format, shard=Shard.parse(job.shard))
    found = (item for item in read if isinstance(item, Trajectory))
    return sum(len(item.calls) for item in itertools.islice(found, job.max_trajectories))


def _simulate(job: ReplayJob, console: Console, interrupt: Interrupt) -> RunRecord:
    tokenizer = ChatTokenizer.from_folder(job.model_folder)
    study = Study(shared=job.shared_cache)
    errors = []
    for item in _trajectories(job, tokenizer):
        if interrupt.asked:
            break
        if isinstance(item, TraceError):
            errors.append(str(item))
        else:
            study.add(item)
    header = job.header
    return RunRecord(
        model=header.model, mode=header.mode, traces=header.traces, policies=study.results(),
        errors=tuple(errors), interrupted=interrupt.asked,
    )  # fmt: skip


def _replay(job: ReplayJob, console: Console, interrupt: Interrupt) -> RunRecord:
    from jaxhybrid.engine.config import EngineConfig
    from jaxhybrid.engine.engine import Engine
    from jaxhybrid.model import load_model
    from jaxhybrid.platform import use_compilation_cache
    from jaxhybrid.traces.replay import Replay, ReplayOptions, flat_counters

    use_compilation_cache(job.compilation_cache)
    model = load_model(job.model_folder)
    config = EngineConfig(
        max_sequences=job.max_sequences,
        max_tokens=job.max_tokens,
        max_checkpoints=job.max_checkpoints,
        prefill_chunks=PREFILL_CHUNKS,
        row_buckets=(job.max_sequences,),
    )
    engine = Engine(model, config)
    study = Study(shared=job.shared_cache)

    def studied() -> Iterator[TokenTrajectory | TraceError]:
        for item in _trajectories(job, model.tokenizer):
            if isinstance(item, TokenTrajectory):
                study.add(item)
            yield item

    with RunLog(Path(job.out) / "run.jsonl", job.header, resume=job.resume) as log:
        with Progress(_count_calls(job), console, done=len(log.calls)) as progress:
            options = ReplayOptions(mode=job.mode, splice=job.splice)
            replay = Replay(engine, log, options, progress.update, lambda: interrupt.asked)
            replay.run(studied())
        counters = flat_counters(engine.stats())
        replay.measure_cold()
        return log.record(
            policies=study.results(), counters=counters, errors=replay.errors,
            interrupted=interrupt.asked, elapsed_s=replay.elapsed_s,
        )  # fmt: skip
