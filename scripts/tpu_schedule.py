"""Prints, for every TPU kernel at published shapes, what its compiled program issues and moves, and bounds of its time.

python scripts/tpu_schedule.py --parts=tpu-v6e --operators=ssd
python scripts/tpu_schedule.py --write    # all parts, ten minutes each; into docs/schedules/ and docs/kernels.md

The compiler writes gigabytes of text on the way: give it a TMPDIR in memory.

Needs the extra `aot`; no TPU. Nothing here is a measured time: a kernel takes at least the longest of the three bounds.
"""

import os
import tempfile
from pathlib import Path

from absl import app, flags

from jaxhybrid.command_line import run

TPUS = ["tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x"]
PARTS = flags.DEFINE_list("parts", TPUS, "TPUs to compile for.")
MODELS = flags.DEFINE_list("models", [], "Only cases whose model's name contains one of these.")
OPERATORS = flags.DEFINE_list("operators", [], "Only cases whose kernel's name and form begin with one of these.")
WRITE = flags.DEFINE_bool("write", False, "Put the rows into the parts' pages, in place of those that are there.")
flags.register_validator(PARTS, lambda parts: set(parts) <= set(TPUS), f"expected some of {', '.join(TPUS)}")

DOCS = Path(__file__).parents[1] / "docs"
MARKS = ("<!-- printed by scripts/tpu_schedule.py -->\n", "<!-- end -->\n")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    os.environ["JAX_PLATFORMS"] = "cpu"
    from pallas_kernels import published, schedule_page, schedule_report

    every = published.tpu_cases()
    cases = [
        case
        for case in every
        if (not MODELS.value or any(model in case.model for model in MODELS.value))
        and (not OPERATORS.value or f"{case.operator} {case.form}".startswith(tuple(OPERATORS.value)))
    ]
    for part in PARTS.value:
        with tempfile.TemporaryDirectory() as folder:
            about, rows = schedule_report.rows(part, cases, Path(folder))
        print(f"{about}\n\n{schedule_page.table(rows)}")
        if WRITE.value:
            page = DOCS / "schedules" / f"{part}.md"
            old = schedule_page.rows_of(page.read_text(encoding="utf-8")) if page.is_file() else []
            order = [schedule_report.key(case) for case in every]
            page.parent.mkdir(exist_ok=True)
            head = f"# Schedules on {part}\n\n{about}; see [kernels](../kernels.md).\n\n"
            page.write_text(head + schedule_page.table(schedule_page.merged(old, rows, order)), encoding="utf-8")
    if WRITE.value:
        write_summary()


def write_summary() -> None:
    """Of all parts' pages, into docs/kernels.md."""
    from pallas_kernels import schedule_page

    pages = {path.stem: path.read_text(encoding="utf-8") for path in sorted((DOCS / "schedules").glob("*.md"))}
    text = schedule_page.summary({part: schedule_page.rows_of(page) for part, page in pages.items()})
    document = DOCS / "kernels.md"
    before, rest = document.read_text(encoding="utf-8").split(MARKS[0])
    document.write_text(before + MARKS[0] + text + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")


if __name__ == "__main__":
    run(main)
