"""What a model is and what its state costs, from its config.json alone.

python scripts/describe_model.py kimi-linear-48b-a3b --memory_gib=141

NAME is a file of configs/, or a path to a config.json or to a folder that has one.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from absl import app, flags

if TYPE_CHECKING:
    from jaxhybrid.description import Description

DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Of weights and of state that grows with every token.")
STATE_DTYPE = flags.DEFINE_string("state_dtype", "float32", "Of recurrent state.")
MEMORY = flags.DEFINE_float("memory_gib", 80.0, "Device memory that weights and state share.", lower_bound=0.0)
PAGE = flags.DEFINE_integer("page_size", 64, "Tokens to a page.", lower_bound=1)

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
CONTEXTS = {"8k": 8 * 1024, "128k": 128 * 1024, "1M": 1024 * 1024}


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise app.UsageError(f"expected one name of {', '.join(sorted(path.stem for path in CONFIGS.glob('*.json')))}")
    path = config_path(arguments[1])

    from jaxhybrid.description import describe
    from jaxhybrid.models import translate

    config = translate(json.loads(path.read_text(encoding="utf-8")), str(path))
    print("\n".join(lines(describe(config, DTYPE.value, STATE_DTYPE.value), config.max_position_embeddings)))


def config_path(name: str) -> Path:
    """Raises UsageError if nothing of that name has a config."""
    for path in (CONFIGS / f"{name}.json", Path(name), Path(name) / "config.json"):
        if path.is_file():
            return path
    raise app.UsageError(f"{name}: expected a file of configs/, a config.json, or a folder that has one")


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
    app.run(main)
