"""Checks and times every GPU kernel on the GPU at hand, and writes a card: under 8 minutes, whatever it finds.

pip install -e . "jax[cuda13]"                                 # torch, triton, flash-linear-attention: if to compare
python scripts/bench_device.py --out=docs/device/h200.md
python scripts/bench_device.py --smoke --out=card.md           # tiny and interpreted, on any machine

Parity comes first, against the sequential references at reduced shapes: a kernel that fails is not timed. Then
published shapes: median time, share of the memory or matrix bound that this run measured, and XLA's form beside it.
When the time is over, the card has what there is. The figures go to a JSON file beside the card.
"""

import os
import sys
import time
from pathlib import Path

from absl import app, flags

from jaxhybrid.command_line import run

OUT = flags.DEFINE_string("out", None, "The card, a Markdown file; a JSON file goes beside it.", required=True)
SECONDS = flags.DEFINE_float("seconds", 450.0, "Begin nothing new after so many.")
SMOKE = flags.DEFINE_bool("smoke", False, "Tiny cases, kernels interpreted: runs without a GPU.")


def main(arguments: list[str]) -> None:
    started = time.monotonic()
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected {arguments[1]!r}: name the card with --out=FILE")
    # Another process, with torch, wants memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    from device_run import DeviceRun

    if not SMOKE.value and jax.default_backend() != "gpu":
        raise app.UsageError(f"expected a GPU, got {jax.default_backend()}: --smoke runs without one")
    device_run = DeviceRun(Path(OUT.value), SMOKE.value, started + SECONDS.value)
    device_run.check_parity()
    device_run.time_kernels()
    if not SMOKE.value:
        device_run.time_fla()
    if not all(ok for *_, ok in device_run.results.parity):
        sys.exit("a kernel failed parity")


if __name__ == "__main__":
    run(main)
