"""The benchmark of the GPU kernels, with tiny cases and the kernels interpreted."""

import json
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import device_cases  # noqa: E402
import device_timing  # noqa: E402
from device_card import Measured, Results, markdown  # noqa: E402
from device_run import DeviceRun  # noqa: E402

from pallas_kernels import published_gpu, published_gpu_case  # noqa: E402


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """What a run leaves behind: the card, and the figures."""
    card = tmp_path_factory.mktemp("device") / "deep" / "card.md"
    command = [sys.executable, str(SCRIPTS / "bench_device.py"), "--smoke", f"--out={card}"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return card.read_text(), json.loads(card.with_suffix(".json").read_text())


def test_a_run_checks_and_times_every_case(smoke):
    card, figures = smoke
    operators = [case.operator for case in device_cases.smoke_cases()]
    assert [operator for operator, *_ in figures["parity"]] == operators
    assert all(ok for *_, ok in figures["parity"])
    assert [measured["operator"] for measured in figures["measured"]] == operators
    assert all(measured["kernel"] > 0 and measured["xla"] > 0 for measured in figures["measured"])
    assert figures["bytes_per_second"] > 0
    assert figures["multiply_adds_per_second"] > 0
    assert f"{len(operators)} of {len(operators)} agree" in card
    assert card.count("| tiny |") == 2 * len(operators)


def delta_case():
    return published_gpu.gated_delta_case("tiny", published_gpu.DeltaShape(1, 1, 32, True), 2, 1)


def test_a_kernel_that_is_wrong_anywhere_fails_parity(monkeypatch):
    public, kernel = published_gpu_case.OPERATORS["gated_delta"]
    assert device_timing.parity_error(delta_case(), True) < 1e-6

    def wrong_output(*arguments, **options):
        out, state = kernel(*arguments, **options)
        return out.at[0, 0, 0, 7].add(1), state

    def wrong_state(*arguments, **options):
        out, state = kernel(*arguments, **options)
        return out, state.at[0, 0, 0, 0, 0].set(jnp.nan)

    for wrong in (wrong_output, wrong_state):
        monkeypatch.setitem(published_gpu_case.OPERATORS, "gated_delta", (public, wrong))
        assert device_timing.parity_error(delta_case(), True) > device_timing.TOLERANCE


def test_inputs_fork_a_state_and_write_none_that_is_read_by_others():
    case = published_gpu.short_conv_case("tiny", 20, 3, 5)
    inputs = {name: np.asarray(x) for name, x in device_cases.make_inputs(case, ragged=True).items()}
    read, write = inputs["read_slots"], inputs["write_slots"]
    assert read[0] == read[-1]
    for row, slot in enumerate(write):
        assert slot not in np.delete(read, row)
    assert inputs["lengths"].tolist() == [5, 2, 0]
    assert np.isnan(inputs["x"][1, 2:].astype(np.float32)).all()


def name(case):
    return f"{case.operator} {case.model} {case.rows}"


@pytest.mark.parametrize("case", device_cases.timed_cases(), ids=name)
def test_every_timed_case_has_bounds_and_a_pool_that_fits_a_device(case):
    memory, matrix = device_timing.Bounds(4e12, 4e14).seconds(case)
    assert 0 < memory < 0.01
    assert 0 <= matrix < 0.1
    assert sum(x.size * x.dtype.itemsize for x in case.arguments.values()) < 40 << 30


def test_the_time_runs_out(tmp_path):
    run = DeviceRun(tmp_path / "card.md", smoke=True, end=time.monotonic())
    run.check_parity()
    run.time_kernels()
    assert [ok for *_, ok in run.results.parity] == [False] * len(device_cases.smoke_cases())
    assert run.results.measured == []
    assert f"{len(device_cases.smoke_cases())} more cases did not fit into the time" in run.card.read_text()


def test_what_failed_parity_is_not_timed(tmp_path):
    run = DeviceRun(tmp_path / "card.md", smoke=True, end=time.monotonic())
    measured = run.measure(delta_case(), device_timing.Bounds(1e9, 1e9), failed=True, least=1e-3)
    assert measured.kernel is None
    assert measured.note == "failed parity: not timed"


def test_without_torch_the_comparison_says_so(tmp_path):
    run = DeviceRun(tmp_path / "card.md", smoke=True, end=time.monotonic())
    run.time_fla()
    assert run.results.fla == {}
    assert "It did not run: ModuleNotFoundError: No module named 'torch'" in run.card.read_text()


def test_the_card_compares_with_fla_case_by_case():
    results = Results({"device": "D"}, measured=[Measured("gated_delta", "M", 64, 1, kernel=2e-6, xla=3e-6)])
    results.fla = {"M/64x1/fused_recurrent_kda": 5e-6, "M/1x1/fused_recurrent_kda": 1e-6}
    card = markdown(results)
    assert "| M | 64 x 1 | `fused_recurrent_kda` | 2.50 |" in card
    assert "| M | 1 x 1 | `fused_recurrent_kda` |  |" in card
    assert "| gated_delta | M | 64 x 1 | 2.0 | 0% of memory | 1.50 |  |" in card
