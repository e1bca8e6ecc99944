import json
from pathlib import Path

import pytest
from chat_runs import write_chat_model


@pytest.fixture(scope="session")
def chat_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint with a tokenizer and a chat template."""
    config = json.loads((tiny_folder / "config.json").read_text())
    return write_chat_model(tmp_path_factory.mktemp("chat"), config)
