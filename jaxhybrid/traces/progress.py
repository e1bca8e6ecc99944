"""How far a replay has come: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

import rich.progress
from rich.console import Console
from rich.text import Text

from jaxhybrid.traces import units
from jaxhybrid.traces.record import CallRecord


class Progress:
    """Counts calls as they finish. Use as a context manager; `update` takes each finished call.

    Shows calls done, tokens through the model per second of wall time (gap, new and generated), the share of prompt
    tokens reused, and the time left, which supposes that the calls left cost what those done did on average.

    Args:
        total: calls to be done, those of an earlier, resumed run included.
        done: calls that an earlier run has done.
        every_s: seconds between lines where the console is not a terminal.
    """

    def __init__(
        self,
        total: int,
        console: Console,
        *,
        done: int = 0,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.done = done
        self.skipped = 0
        self._console = console
        self._every_s = every_s
        self._clock = clock
        self._began = self._last_line = clock()
        self._before = done
        self._printed: tuple[int, int] | None = None
        self._computed = self._resumed = self._prompt = 0
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)

    def __enter__(self) -> Progress:
        self._began = self._last_line = self._clock()
        if self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(bar_width=None),
                rich.progress.TextColumn("{task.description}", markup=False),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.status(), total=self.total, completed=self.done)
        return self

    def update(self, call: CallRecord) -> None:
        """Counts one finished call."""
        self.done += 1
        self._computed += call.gap + call.new_tokens + call.generated
        self._resumed += call.resumed
        self._prompt += call.prompt_tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=self.status())
        elif self._clock() - self._last_line >= self._every_s:
            self._print_line()

    def skip(self, calls: int = 1) -> None:
        """Takes calls that can't be done off the total."""
        self.total -= calls
        self.skipped += calls
        if self._bar is not None:
            self._bar.update(self._task, total=self.total, description=self.status())

    def status(self) -> str:
        """One line: calls done, tokens/s, hit rate, time left."""
        elapsed = max(self._clock() - self._began, 1e-9)
        parts = [f"{self.done:,}/{self.total:,} calls"]
        if self.skipped:
            parts.append(f"{self.skipped:,} skipped")
        replayed = self.done - self._before
        if replayed:
            hit_rate = self._resumed / self._prompt if self._prompt else 0.0
            parts += [f"{units.compact(self._computed / elapsed)} tok/s", f"{units.share(hit_rate)} reused"]
            left = (self.total - self.done) * elapsed / replayed
            parts.append(f"{_clock_time(left)} left" if self.done < self.total else f"took {_clock_time(elapsed)}")
        return ", ".join(parts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._printed != (self.done, self.skipped):
            self._print_line()

    def _print_line(self) -> None:
        self._last_line = self._clock()
        self._printed = self.done, self.skipped
        self._console.print(Text(self.status()), soft_wrap=True)


def _clock_time(seconds: float) -> str:
    """75 -> '1:15'; 3675 -> '1:01:15'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
