"""Prints which implementation each operator of a published model gets on a platform, and why: from its config alone.

python scripts/show_kernels.py --config=kimi-linear-48b-a3b --platform=tpu-v6e
python scripts/show_kernels.py --config=qwen3-next-80b-a3b --platform=h200 --shapes=1x2048,256x1

--config takes a name of configs/, a path to a config.json, or a folder that has one.
Shapes are rows x tokens of a step: a row with more than one token is a prefill, with one a decode step. `calls` are
layers. "fallback" marks a call that the platform's own kernel refused.
"""

from absl import app, flags
from config_file import config_file

from jaxhybrid.command_line import run

PLATFORMS = {
    "cpu": "cpu", "tpu-v5e": "tpu", "tpu-v5p": "tpu", "tpu-v6e": "tpu", "tpu-7x": "tpu", "h100": "gpu", "h200": "gpu",
}  # fmt: skip

CONFIG = flags.DEFINE_string(
    "config", None, "A name of configs/, a config.json, or a folder that has one.", required=True
)
PLATFORM = flags.DEFINE_enum("platform", "cpu", list(PLATFORMS), "Where the model would run.")
SHAPES = flags.DEFINE_list("shapes", ["1x2048", "64x1"], "Steps to look at: rows x tokens.")
ARGUMENTS = flags.DEFINE_bool("arguments", False, "Show dtypes and shapes of the arguments too.")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected {arguments[1]!r}: name the config with --config=FILE")
    path, steps = config_file(CONFIG.value), [_step(shape) for shape in SHAPES.value or [""]]
    import os
    import sys

    os.environ["JAX_PLATFORMS"] = "cpu"
    from rich.console import Console
    from rich.table import Table

    from jaxhybrid.kernel_table import HEADER, kernel_table

    columns = HEADER if ARGUMENTS.value else HEADER[:-1]
    table = Table(title=f"{CONFIG.value} on {PLATFORM.value}")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in kernel_table(path, PLATFORMS[PLATFORM.value], steps):
        table.add_row(*row[: len(columns)])
    console = Console()
    if not console.is_terminal:
        # Where nothing says how wide a line may be, it is as wide as it needs to be.
        console.width = console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum
    console.print(table)


def _step(shape: str) -> tuple[int, int]:
    rows, times, tokens = shape.partition("x")
    if not (times and rows.isdecimal() and tokens.isdecimal() and int(rows) and int(tokens)):
        raise app.UsageError(f"--shapes: expected rows x tokens, both at least 1, such as 64x1, got {shape!r}")
    return int(rows), int(tokens)


if __name__ == "__main__":
    run(main)
