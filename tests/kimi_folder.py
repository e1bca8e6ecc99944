"""Small checkpoint folders in the published form of Kimi's tokenizer."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = (
    "He",
    "Hel",
    "Hello",
    "me",
    "mes",
    "mess",
    "message",
    " r",
    " ro",
    " role",
    "th",
    "thi",
    "thin",
    "think",
    "汉",
    "汉字",
)
FIRST_CONTROL = 256 + len(WORDS)
K3_TOKENS = {
    FIRST_CONTROL + place: name
    for place, name in {
        0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
        18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>", 255: "[PAD]",
    }.items()
}  # fmt: skip


def tiktoken_model(words: Sequence[str] = WORDS) -> bytes:
    """All bytes, then the words; a word of several bytes needs its beginnings among them to be made."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


def write_kimi_folder(
    folder: Path,
    config: Mapping[str, Any],
    names: Mapping[int, str] = K3_TOKENS,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """tiktoken.model, tokenizer_config.json and config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_bytes(tiktoken_model())
    declared = {str(token_id): {"content": name, "special": True} for token_id, name in names.items()}
    chosen = {"added_tokens_decoder": declared, "bos_token": "[BOS]", "eos_token": "[EOS]", **(settings or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(chosen))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
