"""Which config.json a command line means."""

from pathlib import Path

from absl import app

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
KNOWN = sorted(path.stem for path in CONFIGS.glob("*.json"))


def config_file(name: str) -> Path:
    """Of a name of configs/, a config.json, or a folder that has one. Raises UsageError if nothing has one."""
    for path in (CONFIGS / f"{name}.json", Path(name), Path(name) / "config.json"):
        if path.is_file():
            return path
    raise app.UsageError(f"{name}: expected a file of configs/, a config.json, or a folder that has one")
