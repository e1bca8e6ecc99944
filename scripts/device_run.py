"""The steps of bench_device.py, each of which leaves the card as it then is."""

import json
import subprocess
import sys
import time
from pathlib import Path

import device_cases
import device_timing
import jax
from device_card import Measured, Results, markdown

from pallas_kernels.published_gpu_case import GpuCase

# Kept for the comparison with flash-linear-attention, whose kernels are compiled and tuned on first use.
FLA_SECONDS = 60.0


class DeviceRun:
    """One run: tiny and interpreted if `smoke`. Nothing new begins after `end`, by `time.monotonic`."""

    def __init__(self, card: Path, smoke: bool, end: float) -> None:
        self.card, self.smoke, self.end = card, smoke, end
        self.reserve = 0.0 if smoke else FLA_SECONDS
        self.results = Results(device_facts())

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def check_parity(self) -> None:
        """Every kernel against the reference; those there is no time for count as failed."""
        for case in device_cases.smoke_cases() if self.smoke else device_cases.parity_cases():
            error = float("inf")
            if self.left() > self.reserve:
                try:
                    error = device_timing.parity_error(case, self.smoke)
                except Exception as problem:  # one kernel's failure must not cost the others their time
                    say(case, f"{type(problem).__name__}: {str(problem)[:300]}")
            ok = error <= device_timing.TOLERANCE
            self.results.parity.append((case.operator, case.form, case.model, error, ok))
            say(case, f"error {error:.1e}{'' if ok else ' FAILED'}")
        self.write()

    def time_kernels(self) -> None:
        """This run's bounds, then each case that there is time for."""
        least = 1e-3 if self.smoke else 20e-3
        elements, width = (1 << 12, 64) if self.smoke else (1 << 29, 8192)
        bounds = device_timing.measure_bounds(elements, width, least)
        self.results.bytes_per_second = bounds.bytes_per_second
        self.results.multiply_adds_per_second = bounds.multiply_adds_per_second
        failed = {(operator, form) for operator, form, _, _, ok in self.results.parity if not ok}
        cases = device_cases.smoke_cases() if self.smoke else device_cases.timed_cases()
        for number, case in enumerate(cases):
            if self.left() < self.reserve:
                self.results.left_out = len(cases) - number
                break
            measured = self.measure(case, bounds, (case.operator, case.form) in failed, least)
            self.results.measured.append(measured)
            say(case, measured.row())
            self.write()
        self.write()

    def measure(self, case: GpuCase, bounds: device_timing.Bounds, failed: bool, least: float) -> Measured:
        """One case, in loops of `least` seconds; not if its kernel failed parity."""
        memory, matrix = bounds.seconds(case)
        measured = Measured(case.operator, case.model, *case.rows, memory_bound=memory, matrix_bound=matrix)
        if failed:
            measured.note = "failed parity: not timed"
            return measured
        for kind, name in (("pallas", "kernel"), ("xla", "xla")):
            try:
                setattr(measured, name, device_timing.seconds_per_call(case, kind, self.smoke, least))
            except Exception as problem:  # as above: out of memory, say
                measured.note += f"{kind}: {type(problem).__name__} "
                say(case, f"{kind}: {str(problem)[:300]}")
        return measured

    def time_fla(self) -> None:
        """In a process of its own: two CUDA runtimes in one would fight for memory."""
        jax.clear_caches()
        command = [sys.executable, str(Path(__file__).with_name("fla_timing.py"))]
        seconds = max(self.left(), FLA_SECONDS / 2)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
            self.results.fla = json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            self.results.fla_note = "It did not finish in time."
        except subprocess.CalledProcessError as problem:
            self.results.fla_note = f"It did not run: {problem.stderr.strip().splitlines()[-1]}"
        self.write()

    def write(self) -> None:
        """The card, and the figures beside it."""
        self.card.parent.mkdir(parents=True, exist_ok=True)
        self.card.write_text(markdown(self.results), encoding="utf-8")
        figures = json.dumps(self.results.as_json(), indent=1)
        self.card.with_suffix(".json").write_text(figures + "\n", encoding="utf-8")


def device_facts() -> dict[str, str]:
    """Name, driver and versions."""
    facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "driver": "unknown"}
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        pass
    return facts


def say(case: GpuCase, text: str) -> None:
    """A line of progress."""
    print(f"{case.operator} {case.form} {case.model}: {text}", flush=True)
