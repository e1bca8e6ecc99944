"""Prints, for every TPU kernel at published shapes, what its compiled program issues and moves, and bounds of its time.

python scripts/tpu_schedule.py --parts=tpu-v6e
python scripts/tpu_schedule.py --write            # all parts; puts the table into docs/kernels.md (minutes)

Needs the extra `aot`; no TPU. Nothing here is a measured time: a kernel takes at least the longest of the three bounds.
"""

import os
import tempfile
from pathlib import Path

from absl import app, flags

PARTS = flags.DEFINE_list("parts", ["tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x"], "TPUs to compile for.")
MODELS = flags.DEFINE_list("models", [], "Only cases whose model's name contains one of these.")
WRITE = flags.DEFINE_bool("write", False, "Put the table into docs/kernels.md, in place of the one that is there.")

DOCUMENT = Path(__file__).parents[1] / "docs" / "kernels.md"
MARKS = ("<!-- printed by scripts/tpu_schedule.py -->\n", "<!-- end -->\n")


def main(_: list[str]) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from pallas_kernels import schedule_report

    with tempfile.TemporaryDirectory() as folder:
        table = schedule_report.report(PARTS.value, MODELS.value, Path(folder))
    print(table)
    if WRITE.value:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, rest = text.split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        DOCUMENT.write_text(before + MARKS[0] + table + MARKS[1] + after, encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
