"""Writes tests/models/saved_configs.json: what transformers 5 makes of each published config.json when it saves it.

Fine-tuned models come with such files. For each file of configs/: the keys that transformers adds or changes (`set`),
and those it leaves out (`gone`). Needs the extra `oracle`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from absl import app

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "tests" / "models" / "saved_configs.json"
INERT = ("transformers_version", "torch_dtype", "dtype")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    changes = {}
    for file in sorted(ROOT.glob("configs/*.json")):
        published = json.loads(file.read_text(encoding="utf-8"))
        if (saved := saved_again(published)) is not None:
            changes[file.stem] = difference(published, saved)
    lines = [f"{json.dumps(name)}: {json.dumps(change, sort_keys=True)}" for name, change in changes.items()]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def saved_again(published: dict[str, Any]) -> dict[str, Any] | None:
    """None for a model that transformers does not know."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if published["model_type"] not in CONFIG_MAPPING:
        return None
    known = {key: value for key, value in published.items() if key != "auto_map"}
    with tempfile.TemporaryDirectory() as folder:
        CONFIG_MAPPING[published["model_type"]].from_dict(known).save_pretrained(folder)
        return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def difference(published: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    changed = {
        key: value
        for key, value in saved.items()
        if key not in INERT and (key not in published or published[key] != value)
    }
    return {"set": changed, "gone": [key for key in published if key not in saved and key not in INERT]}


if __name__ == "__main__":
    app.run(main)
