"""Reads what libtpu says about a compiled Pallas kernel: its bundles, what each unit does in them, and spills.

A TensorCore issues one bundle of instructions a cycle, so a kernel cannot take fewer cycles than it has bundles to
issue. How long it waits for memory is not in a schedule.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_BUNDLE = re.compile(r"^ *0x([0-9a-f]+) *(?:[A-Z]{2})?[: ]*>* *\{")
_REGION_START = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_JUMP = re.compile(r"sbr\.rel.*?target = \$region(\d+)")
# Conditional blocks of at least so many bundles are steps of a kernel, not parts of its pipeline's control.
_BLOCK = 100


@dataclass(frozen=True)
class Schedule:
    """Of one kernel. `step`: bundles of a grid step; `edge`: bundles that only a row's first or last step issues.

    `units`: for each unit, the share of its slots used over the step's own code. `spills`: vector registers stored
    there for want of room.
    """

    step: int
    edge: int
    units: dict[str, float]
    spills: int


def dump_to(folder: Path) -> None:
    """Make libtpu write schedules there. Only before anything was compiled for a TPU in this process."""
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def take(folder: Path, kernel: str) -> Schedule:
    """The schedule of the one kernel of this name (a part of it will do) in the folder, which is emptied.

    Raises ValueError if the folder has none, or several.
    """
    found = [
        path for path in sorted(folder.glob(f"*{kernel}*final_bundles.txt")) if "schedule-analysis" not in path.name
    ]
    if len(found) != 1:
        raise ValueError(f"schedules of {kernel!r} in {folder}: expected one, got {[path.name for path in found]}")
    (use,) = folder.glob(f"*{kernel}*final_hlo-static-per-bundle-utilization.txt")
    schedule = read(found[0].read_text(), use.read_text())
    for path in folder.iterdir():
        path.unlink()
    return schedule


def read(bundles: str, utilization: str) -> Schedule:
    """From the text of the two dumps: the final bundles, and each bundle's use of units."""
    count, blocks = _conditional_blocks(bundles)
    main = max(blocks, key=len, default=range(count))
    edge = sum(len(block) for block in blocks if block is not main)
    head, _, rows = utilization.partition("== UTILIZATION:")
    names, capacities = head.strip().splitlines()[1:3]
    used = np.array([[int(n) for n in row.split()] for row in rows.strip().splitlines()])[main.start : main.stop]
    units = [name.strip() for name in names.split(",")]
    shares = used.sum(0) / (np.array(capacities.split(), int) * len(used))
    spills = int(used[:, units.index("VSTORE:SPILL")].sum())
    return Schedule(count - edge, edge, dict(zip(units, shares.tolist(), strict=True)), spills)


def _conditional_blocks(bundles: str) -> tuple[int, list[range]]:
    """How many bundles there are, and the longest stretches that a forward jump may skip, outermost ones only."""
    starts: dict[int, int] = {}
    jumps: list[tuple[int, int]] = []
    count = 0
    for address, line in _bundles(bundles):
        count = address + 1
        starts |= {int(region): address for region in _REGION_START.findall(line)}
        jumps += [(address, int(region)) for region in _JUMP.findall(line)]
    # The first and widest is the whole body, which the pipeline skips at its last, empty step.
    spans = sorted((range(a, starts[r]) for a, r in jumps if starts.get(r, a) - a >= _BLOCK), key=len, reverse=True)
    if len(spans) > 1:
        body, *spans = spans
        spans = [span for span in spans if body.start <= span.start and span.stop <= body.stop]
    return count, [
        span for i, span in enumerate(spans)
        if not any(outer.start <= span.start and span.stop <= outer.stop for outer in spans[:i])
    ]  # fmt: skip


def _bundles(text: str) -> Iterator[tuple[int, str]]:
    for line in text.splitlines():
        if match := _BUNDLE.match(line):
            yield int(match[1], 16), line
