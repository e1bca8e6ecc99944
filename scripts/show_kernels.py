"""Prints which implementation each operator of a published model gets on a platform, and why: from its config alone.

python scripts/show_kernels.py --config=configs/kimi-linear-48b-a3b.json --platform=tpu-v6e
python scripts/show_kernels.py --config=configs/qwen3-next-80b-a3b.json --platform=h200 --shapes=1x2048,256x1

Shapes are rows x tokens of a step: a row with more than one token is a prefill, with one a decode step. `calls` are
layers. "fallback" marks a call that the platform's own kernel refused.
"""

from absl import app, flags

from jaxhybrid.command_line import run

PLATFORMS = {
    "cpu": "cpu", "tpu-v5e": "tpu", "tpu-v5p": "tpu", "tpu-v6e": "tpu", "tpu-7x": "tpu", "h100": "gpu", "h200": "gpu",
}  # fmt: skip

CONFIG = flags.DEFINE_string("config", None, "A published config.json.", required=True)
PLATFORM = flags.DEFINE_enum("platform", "cpu", list(PLATFORMS), "Where the model would run.")
SHAPES = flags.DEFINE_list("shapes", ["1x2048", "64x1"], "Steps to look at: rows x tokens.")
ARGUMENTS = flags.DEFINE_bool("arguments", False, "Show dtypes and shapes of the arguments too.")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected {arguments[1]!r}: name the config with --config=FILE")
    import os

    os.environ["JAX_PLATFORMS"] = "cpu"
    from rich.console import Console
    from rich.table import Table

    from jaxhybrid.kernel_table import HEADER, kernel_table

    try:
        shapes = [(int(rows), int(tokens)) for rows, tokens in (shape.split("x") for shape in SHAPES.value)]
    except ValueError as error:
        raise app.UsageError(f"--shapes: expected rows x tokens such as 64x1, got {SHAPES.value}") from error
    columns = len(HEADER) if ARGUMENTS.value else len(HEADER) - 1
    table = Table(*HEADER[:columns], title=f"{CONFIG.value} on {PLATFORM.value}")
    for row in kernel_table(CONFIG.value, PLATFORMS[PLATFORM.value], shapes):
        table.add_row(*row[:columns])
    Console().print(table)


if __name__ == "__main__":
    run(main)
