"""A tiny model that can chat, and agent runs for it: what the main job needs, in seconds."""

import json
import random
import shutil
from pathlib import Path

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
TOKENIZER_SIZE = 1024


def write_chat_model(folder: Path, config: dict) -> Path:
    """A random checkpoint of `config` with the tokenizer and chat template of the goldens."""
    from jaxhybrid.models.random_folder import write_random_folder

    write_random_folder(folder, config | {"vocab_size": TOKENIZER_SIZE}, seed=3)
    for file in (GOLDENS / "chat" / "tokenizer").iterdir():
        shutil.copy(file, folder)
    return folder


def conversation(id: str, calls: int, *, words: int = 6, shared: str = "You are an agent in a repository.") -> dict:
    """A run of `calls` tool calls, each with an answer of its own, reproducible by `id`."""
    rng = random.Random(id)
    vocabulary = ["open", "file", "test", "error", "line", "return", "value", "index", "table", "fix"]

    def text() -> str:
        return " ".join(rng.choices(vocabulary, k=words))

    messages: list[dict] = [{"role": "system", "content": shared}, {"role": "user", "content": text()}]
    for number in range(calls):
        call = {"id": f"c{number}", "function": {"name": "run", "arguments": json.dumps({"command": text()})}}
        messages.append({"role": "assistant", "content": text(), "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": text()})
    return {"id": id, "messages": messages}


def write_runs(path: Path, runs: list[dict]) -> Path:
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    return path
