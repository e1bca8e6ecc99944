"""The card that bench_device.py writes: what was measured, as ratios within one run."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Measured:
    """One case: seconds a call, of the kernel, of XLA's form, and at the least by this run's own bounds."""

    operator: str
    model: str
    rows: int
    tokens: int
    kernel: float | None = None
    xla: float | None = None
    memory_bound: float = 0.0
    matrix_bound: float = 0.0
    note: str = ""

    def row(self) -> str:
        """Of the card's table."""
        bound = max(self.memory_bound, self.matrix_bound)
        by = "memory" if self.memory_bound >= self.matrix_bound else "matrix"
        share = "" if self.kernel is None else f"{bound / self.kernel:.0%} of {by}"
        times = "" if self.kernel is None or self.xla is None else f"{self.xla / self.kernel:.2f}"
        microseconds = "" if self.kernel is None else f"{1e6 * self.kernel:.1f}"
        cells = (self.operator, self.model, f"{self.rows} x {self.tokens}", microseconds, share, times, self.note)
        return f"| {' | '.join(cells)} |"


@dataclass
class Results:
    """All of a run. `parity`: (operator, form, what, error, passed). `fla`: its kernels' seconds, by case."""

    device: dict[str, str]
    parity: list[tuple[str, str, str, float, bool]] = field(default_factory=list)
    bytes_per_second: float = 0.0
    multiply_adds_per_second: float = 0.0
    measured: list[Measured] = field(default_factory=list)
    fla: dict[str, float] = field(default_factory=dict)
    fla_note: str = ""
    left_out: int = 0

    def as_json(self) -> dict[str, Any]:
        """Every figure."""
        return asdict(self)


def markdown(results: Results) -> str:
    """The card."""
    device = ", ".join(f"{name} {value}" for name, value in results.device.items())
    passed = sum(ok for *_, ok in results.parity)
    lines = [
        "# GPU kernels on a device", "",
        f"Written by `scripts/bench_device.py`: {device}.", "",
        f"In the same run a copy moved {results.bytes_per_second / 1e12:.2f} TB/s, read and written, and a bfloat16",
        f"product did {2 * results.multiply_adds_per_second / 1e12:.0f} TFLOP/s: the bounds below are by those two. A",
        "kernel's time is the median of calls that follow one another in a loop within one program.", "",
        "## Parity", "",
        f"{passed} of {len(results.parity)} agree with the sequential float32 reference. Error is root mean square",
        "over that of the reference, of bfloat16 inputs; of the indexer, the share of keys chosen otherwise.", "",
        "| operator | form | case | error | |", "| --- | --- | --- | --- | --- |",
        *(f"| {op} | {form} | {what} | {error:.1e} | {'' if ok else 'FAILED'} |"
          for op, form, what, error, ok in results.parity), "",
        "## Time", "",
        "| operator | model | rows x tokens | kernel, us | share of bound | XLA's form takes x times | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(measured.row() for measured in results.measured), "",
    ]  # fmt: skip
    if results.left_out:
        lines += [f"{results.left_out} more cases did not fit into the time.", ""]
    lines += ["## Against flash-linear-attention", "", *_against_fla(results), ""]
    return "\n".join(lines)


def _against_fla(results: Results) -> list[str]:
    if not results.fla:
        return [results.fla_note or "It was not run."]
    lines = [
        "Its kernels have neither slots to read and write nor rows of other lengths.", "",
        "| model | rows x tokens | its function | takes x times as long as ours |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    ours = {f"{m.model}/{m.rows}x{m.tokens}": m.kernel for m in results.measured if m.operator == "gated_delta"}
    for name, seconds in results.fla.items():
        case, function = name.rsplit("/", 1)
        model, rows = case.rsplit("/", 1)
        kernel = ours.get(case)
        times = "" if kernel is None else f"{seconds / kernel:.2f}"
        lines.append(f"| {model} | {rows.replace('x', ' x ')} | `{function}` | {times} |")
    return lines
