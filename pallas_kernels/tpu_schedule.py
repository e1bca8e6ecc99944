"""Reads what libtpu says about a compiled Pallas kernel: its bundles, what each unit does in them, and spills.

A TensorCore issues one bundle of instructions a cycle, so a kernel cannot take fewer cycles than it has bundles to
issue. How long it waits for memory is not in a schedule.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_BUNDLE = re.compile(r"^ *0x([0-9a-f]+) *(?:[A-Z]{2})?[: ]*>* *\{")
_REGION_START = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_JUMP = re.compile(r"sbr\.rel.*?target = \$region(\d+)")
# Conditional blocks of at least so many bundles are steps of a kernel, not parts of its pipeline's control.
_BLOCK = 100


@dataclass(frozen=True)
class Loop:
    """The longest loop within a grid step. `bundles`: of its code; `bodies`: of those conditional blocks in it that use
    the matrix unit, of which a trip takes one, the shortest first."""

    bundles: int
    bodies: tuple[int, ...]

    def issued(self, trips: tuple[int, ...]) -> int:
        """Bundles of so many trips with each body; of so many in all where there is no choice."""
        bodies = self.bodies if len(self.bodies) > 1 else (sum(self.bodies),)
        taken = sum(count * body for count, body in zip(trips, bodies, strict=True))
        return sum(trips) * (self.bundles - sum(self.bodies)) + taken


@dataclass(frozen=True)
class Schedule:
    """Of one kernel. `step`: bundles of a grid step; `edge`: bundles that only a row's first or last step issues.

    `loop` is a part of the step. `units`: for each unit, the share of its slots used over the step's own code, or the
    loop's. `spills`: vector registers stored there for want of room. `loops`: of every loop, in the order of the code,
    the bundles that are in no loop within it; the first is that over grid steps, if there are several. `outside`: those
    that are in no loop.
    """

    step: int
    edge: int
    units: dict[str, float]
    spills: int
    loop: Loop | None = None
    loops: tuple[int, ...] = ()
    outside: int = 0

    def issued(self, trips: tuple[int, ...]) -> int:
        """Bundles of a step with so many trips of each of its loops. Raises ValueError if those are not as many."""
        grid = len(self.loops) - len(trips)
        if grid not in (0, 1):
            raise ValueError(f"loops of a step: expected {len(trips)}, got {len(self.loops)}: {self.loops}")
        own = zip(trips, self.loops[grid:], strict=True)
        return self.outside + sum(self.loops[:grid]) + sum(count * bundles for count, bundles in own)


def dump_to(folder: Path) -> None:
    """Make libtpu write schedules there. Only before anything was compiled for a TPU in this process."""
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def take(folder: Path, kernel: str, *, rare: bool = False) -> Schedule:
    """The schedule of the one kernel of this name (a part of it will do) in the folder, which is emptied; `rare` as of
    `read`.

    Raises ValueError if the folder has none, or several.
    """
    found = [
        path for path in sorted(folder.glob(f"*{kernel}*final_bundles.txt")) if "schedule-analysis" not in path.name
    ]
    if len(found) != 1:
        raise ValueError(f"schedules of {kernel!r} in {folder}: expected one, got {[path.name for path in found]}")
    (use,) = folder.glob(f"*{kernel}*final_hlo-static-per-bundle-utilization.txt")
    schedule = read(found[0].read_text(), use.read_text(), rare=rare)
    for path in folder.iterdir():
        path.unlink()
    return schedule


def read(bundles: str, utilization: str, *, rare: bool = False) -> Schedule:
    """From the text of the two dumps: the final bundles, and each bundle's use of units.

    `rare`: each step's own work is not in a conditional block; what is, however long, is for few steps, and an edge.
    """
    count, skipped, every = _jumps(bundles)
    # The widest is the whole body.
    repeated = [span for span in every[1:] if len(span) > _BLOCK]
    main: Sequence[int]
    head, _, rows = utilization.partition("== UTILIZATION:")
    names, capacities = head.strip().splitlines()[1:3]
    units = [name.strip() for name in names.split(",")]
    used = np.array([[int(n) for n in row.split()] for row in rows.strip().splitlines()])
    loop = max(repeated, key=len, default=None)
    if rare:
        edges = _outermost(skipped)
        main, edge = [n for n in range(count) if not any(n in span for span in edges)], sum(map(len, edges))
    elif loop is None:
        blocks = _outermost(skipped)
        main = max(blocks, key=len, default=range(count))
        edge = sum(len(block) for block in blocks if block is not main)
    else:
        # Blocks around the loop are the step's, and those in it the loop's.
        apart = [span for span in skipped if span.stop <= loop.start or span.start >= loop.stop]
        main, edge = loop, sum(map(len, _outermost(apart)))
    inside = _outermost([span for span in skipped if loop and loop.start < span.start and span.stop <= loop.stop])
    bodies = sorted(len(span) for span in inside if used[span.start : span.stop, units.index("MXU")].any())
    used = used[list(main)]
    shares = used.sum(0) / (np.array(capacities.split(), int) * len(used))
    spills = int(used[:, units.index("VSTORE:SPILL")].sum())
    shares_of = dict(zip(units, shares.tolist(), strict=True))
    return Schedule(
        count - edge,
        edge,
        shares_of,
        spills,
        None if loop is None else Loop(len(loop), tuple(bodies)),
        *_own(every, count),
    )


def _own(loops: list[range], count: int) -> tuple[tuple[int, ...], int]:
    """Of nested loops the bundles that are in no inner one, and of all the bundles those that are in none."""
    innermost: list[range | None] = [None] * count
    for loop in sorted(loops, key=len, reverse=True):
        innermost[loop.start : loop.stop] = [loop] * len(loop)
    return tuple(innermost.count(loop) for loop in sorted(loops, key=lambda loop: loop.start)), innermost.count(None)


def _jumps(bundles: str) -> tuple[int, list[range], list[range]]:
    """How many bundles there are; the long stretches of a grid step's code that a forward jump may skip, the longest
    first; and those that a backward jump repeats, however short, the longest first."""
    starts: dict[int, int] = {}
    jumps: list[tuple[int, int]] = []
    count = 0
    for address, line in _bundles(bundles):
        count = address + 1
        starts |= {int(region): address for region in _REGION_START.findall(line)}
        jumps += [(address, int(region)) for region in _JUMP.findall(line)]
    known = [(address, starts[region]) for address, region in jumps if region in starts]
    skipped = sorted((range(a, start) for a, start in known if start - a >= _BLOCK), key=len, reverse=True)
    repeated = sorted((range(start, a + 1) for a, start in known if a >= start), key=len, reverse=True)
    # The first and widest is the whole body, which the pipeline skips at its last, empty step, and repeats.
    if len(skipped) > 1:
        body, *skipped = skipped
        skipped = [span for span in skipped if body.start <= span.start and span.stop <= body.stop]
    return count, skipped, repeated


def _outermost(spans: list[range]) -> list[range]:
    """Those of the spans, the longest first, that lie in no other."""
    return [
        span for i, span in enumerate(spans)
        if not any(outer.start <= span.start and span.stop <= outer.stop for outer in spans[:i])
    ]  # fmt: skip


def _bundles(text: str) -> Iterator[tuple[int, str]]:
    for line in text.splitlines():
        if match := _BUNDLE.match(line):
            yield int(match[1], 16), line
