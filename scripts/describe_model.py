"""What a model is and what its state costs, from its config.json alone.

python scripts/describe_model.py kimi-linear-48b-a3b --memory_gib=141

NAME is a file of configs/, or a path to a config.json or to a folder that has one.
"""

import math
from typing import TYPE_CHECKING

from absl import app, flags
from config_file import KNOWN, config_file

from jaxhybrid.command_line import run

if TYPE_CHECKING:
    from jaxhybrid.description import Description

DTYPES = ("bfloat16", "float16", "float32")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", DTYPES, "Of weights and of state that grows with every token.")
STATE_DTYPE = flags.DEFINE_enum("state_dtype", "float32", DTYPES, "Of recurrent state.")
MEMORY = flags.DEFINE_float("memory_gib", 80.0, "Device memory that weights and state share.", lower_bound=0.0)
PAGE = flags.DEFINE_integer("page_size", 64, "Tokens to a page.", lower_bound=1)

flags.register_validator(MEMORY, math.isfinite, "expected a number")
CONTEXTS = {"8k": 8 * 1024, "128k": 128 * 1024, "1M": 1024 * 1024}


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise app.UsageError(f"expected one name of {', '.join(KNOWN)}")
    path = config_file(arguments[1])

    from jaxhybrid.checkpoint.json_file import read_json_object
    from jaxhybrid.models import translate

    config = translate(read_json_object(path), str(path))
    from jaxhybrid.description import describe

    print("\n".join(lines(describe(config, DTYPE.value, STATE_DTYPE.value), config.max_position_embeddings)))


def lines(model: "Description", positions: int) -> list[str]:
    shown = [
        f"parameters           {model.parameters / 1e9:.2f} B, {model.active / 1e9:.2f} B of them active per token",
        f"layers               {model.schedule}",
        f"weights              {model.weight_bytes / 2**30:,.1f} GiB ({DTYPE.value})",
        f"state per token      {model.bytes_per_token:,} bytes",
        f"state per sequence   {model.bytes_per_sequence:,} bytes, and {model.logits_bytes:,} of logits",
        f"a snapshot equals    {model.snapshot_tokens:,.0f} tokens",
    ]
    if model.mtp_parameters:
        shown.insert(1, f"prediction layers    {model.mtp_parameters / 1e9:.2f} B more")
    if model.windowed_bytes_per_token:
        shown.insert(-2, f"  of it with a window  {model.windowed_bytes_per_token:,} bytes")
    for name, context in CONTEXTS.items():
        fits = model.sequences(int(MEMORY.value * 2**30), context, PAGE.value)
        beyond = f" (the config allows {positions:,} positions)" if context > positions else ""
        shown.append(f"sequences of {name:<5}   {fits:,} in {MEMORY.value:g} GiB{beyond}")
    return shown


if __name__ == "__main__":
    run(main)
