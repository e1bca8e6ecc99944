"""The main job: read traces, replay or simulate them, report."""

import itertools
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from jaxhybrid.chat import ChatTokenizer
from jaxhybrid.errors import JaxHybridError, TraceError
from jaxhybrid.traces import units
from jaxhybrid.traces.files import content_fingerprint, find_files
from jaxhybrid.traces.pipeline import Shard, read_traces, tokenise_traces
from jaxhybrid.traces.progress import Progress
from jaxhybrid.traces.record import RunHeader, RunLog, RunRecord, make_folder
from jaxhybrid.traces.report_html import write_report
from jaxhybrid.traces.report_table import print_table
from jaxhybrid.traces.simulate import Study
from jaxhybrid.traces.trajectory import TokenTrajectory, Trajectory

if TYPE_CHECKING:
    from jaxhybrid.engine.engine import Engine
    from jaxhybrid.model import Model

DEMO_MODEL = "demo"
WHOLE = "0/1"
INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended
PREFILL_CHUNKS = (64, 512)  # few programs: a short run spends longer compiling than padding costs it

_NO_OPTIONS = ("model", "mode", "traces", "simulate", "switches", "out", "resume", "compilation_cache")
"""Fields of a ReplayJob that a header says in its own way, or that change nothing in what a run computes."""


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
    study_block_size: int = 0
    shard: str = WHOLE
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

    def header(self, weights: str | None = None) -> RunHeader:
        """What must be the same for a run to be resumed.

        `weights`: fingerprint of the model's, if it is loaded; the traces' contents then get one too.
        """
        chosen = {
            field.name: str(getattr(self, field.name))
            for field in fields(self)
            if field.name not in _NO_OPTIONS and getattr(self, field.name) != field.default
        }
        if self.template_switches:
            chosen["switches"] = json.dumps(self.template_switches, sort_keys=True)
        if weights:
            chosen["weights"] = weights[:16]
            chosen["contents"] = content_fingerprint(find_files(self.trace_paths))[:16]
        return RunHeader(
            model=self.model or DEMO_MODEL,
            mode="simulate" if self.simulate else self.mode,
            traces=self.traces or ("the project's own recordings",),
            options=chosen,
        )

    @property
    def template_switches(self) -> Mapping[str, Any]:
        """Raises TraceError unless `switches` is a JSON object."""
        try:
            switches = json.loads(self.switches)
        except ValueError as error:
            raise TraceError(f"--switches: expected a JSON object, got {self.switches!r}: {error}") from error
        if not isinstance(switches, dict):
            raise TraceError(f"--switches: expected a JSON object, got {self.switches!r}")
        return switches

    def study(self) -> Study:
        return Study(shared=self.shared_cache, block_size=self.study_block_size or None)


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
    """Runs to the end or to Ctrl-C, and writes the report.

    Returns the exit status: 0, also where some records or calls were skipped; 1 if nothing could be done; 130 after
    Ctrl-C, with a report on what was done until then.
    """
    console = Console()
    try:
        with Interrupt() as interrupt:
            record = _simulate(job, interrupt) if job.simulate else _replay(job, console, interrupt)
        paths = write_report(record, Path(job.out))
    except (JaxHybridError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_table(record, console)
    console.print(f"report: {paths.html}", soft_wrap=True)
    console.print(f"data:   {paths.json}", soft_wrap=True)
    if record.interrupted:
        return INTERRUPTED
    done = record.policies[0].calls if job.simulate else len(record.calls)
    if not done and not record.errors:
        console.print(f"no calls: none of the trajectories is in shard {job.shard}", soft_wrap=True)
    return 1 if record.errors and not done else 0


def _trajectories(job: ReplayJob, tokenizer: ChatTokenizer) -> Iterator[TokenTrajectory | TraceError]:
    """Tokenised lazily, and no more trajectories than asked for."""
    read = read_traces(job.trace_paths, format=job.format, shard=Shard.parse(job.shard))
    left = job.max_trajectories
    for item in tokenise_traces(read, tokenizer, job.template_switches):
        yield item
        if left is not None and isinstance(item, TokenTrajectory):
            left -= 1
            if not left:
                return


def _count_calls(job: ReplayJob) -> int:
    """Calls of the trajectories to come; reading is cheap beside tokenising and replaying.

    Raises TraceError for what no run could begin with: a missing path, an unknown format, nothing that can be read.
    """
    read = read_traces(job.trace_paths, format=job.format, shard=Shard.parse(job.shard))
    found = (item for item in read if isinstance(item, Trajectory))
    return sum(len(item.calls) for item in itertools.islice(found, job.max_trajectories))


def _simulate(job: ReplayJob, interrupt: Interrupt) -> RunRecord:
    header = job.header()
    make_folder(Path(job.out))
    study = job.study()
    errors = []
    for item in _trajectories(job, ChatTokenizer.from_folder(job.model_folder)):
        if interrupt.asked:
            break
        if isinstance(item, TraceError):
            errors.append(str(item))
        else:
            study.add(item)
    return RunRecord(
        model=header.model, mode=header.mode, traces=header.traces, options=header.options,
        policies=study.results(), errors=tuple(errors), interrupted=interrupt.asked,
    )  # fmt: skip


def _replay(job: ReplayJob, console: Console, interrupt: Interrupt) -> RunRecord:
    from jaxhybrid.model import load_model
    from jaxhybrid.platform import use_compilation_cache
    from jaxhybrid.traces.replay import Replay, ReplayOptions

    total = _count_calls(job)
    job.header()  # whatever is wrong with the command line is said before the model is loaded
    make_folder(Path(job.out))
    use_compilation_cache(job.compilation_cache)
    model = load_model(job.model_folder)
    tokenizer = model.tokenizer
    study = job.study()

    def studied() -> Iterator[TokenTrajectory | TraceError]:
        for item in _trajectories(job, tokenizer):
            if isinstance(item, TokenTrajectory):
                study.add(item)
            yield item

    path = Path(job.out) / "run.jsonl"
    if path.exists() and not job.resume:
        earlier = path.replace(path.with_name("run.previous.jsonl"))
        console.print(f"an earlier run is kept as {earlier}; --resume goes on with one", soft_wrap=True)
    with RunLog(path, job.header(model.fingerprint), resume=job.resume) as log:
        engine = _warm_engine(job, model, console)
        with Progress(total, console, done=len(log.calls)) as progress:
            options = ReplayOptions(mode=job.mode, splice=job.splice)
            replay = Replay(engine, log, options, progress.update, progress.skip, lambda: interrupt.asked)
            replay.run(studied())
            if not interrupt.asked:
                progress.skip(progress.total - progress.done)  # calls of trajectories that were no prompts
        elapsed_s = replay.elapsed_s
        replay.measure_cold()
        return log.record(
            policies=study.results(), errors=replay.errors, interrupted=interrupt.asked, elapsed_s=elapsed_s,
        )  # fmt: skip


def _warm_engine(job: ReplayJob, model: "Model", console: Console) -> "Engine":
    """An engine with its programs compiled, so that no call's times contain that."""
    from jaxhybrid.engine.config import EngineConfig
    from jaxhybrid.engine.engine import Engine

    started = time.perf_counter()
    config = EngineConfig(
        max_sequences=job.max_sequences,
        max_tokens=job.max_tokens,
        max_checkpoints=job.max_checkpoints,
        prefill_chunks=PREFILL_CHUNKS,
        row_buckets=(job.max_sequences,),
    )
    engine = Engine(model, config)
    engine.warm_up(rows=() if job.mode == "score" else (job.max_sequences,), score=job.mode == "score")
    programs, took = engine.stats().compiled_programs, units.seconds(time.perf_counter() - started)
    console.print(f"compiled {units.plural(programs, 'program')} in {took}", highlight=False)
    return engine
