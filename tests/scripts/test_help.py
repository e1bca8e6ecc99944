"""Every script answers --help at once: nothing heavy is imported to print it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ENTRY_POINTS = sorted(path.name for path in SCRIPTS.glob("*.py") if "run(main)" in path.read_text())

# Runs a script as `python script --help` would, and names what it must not have imported.
PROBE = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit:
    pass
print("imported:", *sorted({"jax", "flax", "grain", "torch", "transformers", "optax"} & set(sys.modules)))
"""


def test_there_are_scripts():
    assert {"replay_traces.py", "record_traces.py", "train_demo.py", "make_goldens.py"} <= set(ENTRY_POINTS)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_help_is_quick_and_imports_nothing_heavy(name):
    # The best of two: a busy machine may be slow once.
    took = []
    for _ in range(2):
        started = time.perf_counter()
        result = subprocess.run(
            [sys.executable, "-c", PROBE, str(SCRIPTS / name)], capture_output=True, text=True, check=True
        )
        took.append(time.perf_counter() - started)
        if took[-1] < 2:
            break
    *help_text, imported = result.stdout.strip().splitlines()
    assert imported == "imported:"
    assert any("--" in line for line in help_text)  # a script without flags of its own has --helpfull
    assert min(took) < 2
