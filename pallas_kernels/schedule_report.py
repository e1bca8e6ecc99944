"""The table of `scripts/tpu_schedule.py`: every TPU kernel at published shapes, what it issues and what it moves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import aot, published, tpu_schedule


def clock(info: Any) -> float:
    """Cycles a second, from the operations a second of the matrix units.

    A unit of 128 x 128 takes one row a cycle, one of 256 x 256 two.
    """
    rows = info.mxu_column_size // 128
    return info.bf16_ops_per_second / (2 * info.num_mxus * info.mxu_column_size**2 * rows)


def row(part: aot.Part, case: published.Case, folder: Path) -> list[str]:
    """Compiles the case and counts."""
    info = aot.tpu_info(part)
    compiled = aot.compile_for(part, case.function, *case.arguments, donate=case.donated)
    schedule = tpu_schedule.take(folder, case.operator, rare=case.rare)
    moved = aot.hbm_bytes(compiled)
    step, loop = schedule.step, 0
    if case.trips and schedule.loop:
        step, loop = step - schedule.loop.bundles, schedule.loop.issued(case.trips)
    if case.loops:
        step = schedule.issued(case.loops)
    bundles = case.steps * step + loop + case.edges * schedule.edge
    cores = min(info.num_cores, case.steps if case.rare else case.edges or case.steps)
    issue = bundles / cores / clock(info)
    memory = moved / (info.mem_bw_bytes_per_second * info.num_cores)
    matrix = 2 * case.multiply_adds / (info.bf16_ops_per_second * info.num_cores)
    units = (f"{schedule.units[name]:.0%}" for name in ("MXU", "VALU", "VLOAD", "VSTORE"))
    a_step = (case.steps * step + loop) // case.steps
    return [
        *key(case), f"{a_step:,}",
        f"{case.steps:,}", f"{bundles / case.tokens:,.0f}", *units, f"{schedule.spills:,}",
        f"{moved / case.fewest_bytes:.3f}", *(f"{1e6 * time:,.1f}" for time in (issue, memory, matrix)),
    ]  # fmt: skip


def key(case: published.Case) -> tuple[str, str, str]:
    """What tells the case's row from others."""
    batch = case.arguments[0].shape[0]
    return f"{case.operator} {case.form}", case.model, f"{batch} x {case.tokens // batch}"


def rows(name: str, cases: Sequence[published.Case], folder: Path) -> tuple[str, list[list[str]]]:
    """A line about the part of this name, and a row for each case. `folder` takes what the compiler writes down.

    Raises KeyError for a part that does not exist, RuntimeError if its compiler is absent.
    """
    tpu_schedule.dump_to(folder)
    jax.config.update("jax_enable_compilation_cache", False)
    part = aot.PARTS[name]
    if reason := aot.why_absent(part):
        raise RuntimeError(f"{name}: {reason}")
    info = aot.tpu_info(part)
    about = (
        f"**{name}**, {info.num_cores} core(s) at {clock(info) / 1e9:.2f} GHz, "
        f"{info.mem_bw_bytes_per_second * info.num_cores / 1e12:.2f} TB/s"
    )
    return about, [row(part, case, folder) for case in cases]
