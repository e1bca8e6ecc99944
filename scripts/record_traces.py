"""Record a scripted agent at work on scratch packages with real tools: the trajectories shipped with the model."""

import json
from pathlib import Path

from absl import app, flags

from jaxhybrid.command_line import run

_OUT = flags.DEFINE_string("out", "jaxhybrid/demo/traces", "Folder to write one JSON file per trajectory to.")
_COUNT = flags.DEFINE_integer("count", 5, "How many trajectories to record.", lower_bound=1)
_SPLIT = flags.DEFINE_enum(
    "split", "shipped", ["shipped", "training"], "Held-out modules (what ships) or those of the training text."
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    from jaxhybrid.demo.trajectories import shipped_trajectories, training_trajectories

    source = shipped_trajectories if _SPLIT.value == "shipped" else training_trajectories
    folder = Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    for recording in source(_COUNT.value):
        path = folder / f"{recording.id}.json"
        path.write_text(json.dumps(recording.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        branches = sorted({call.branch for call in recording.calls})
        print(f"{path}: {len(recording.calls)} calls, branches {', '.join(branches)}")


if __name__ == "__main__":
    run(main)
