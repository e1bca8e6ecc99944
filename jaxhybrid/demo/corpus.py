"""What the demo model learns from and is tested on: the standard library's text, and recorded conversations.

Text is held out by the hash of its name, so that the split is the same wherever the same Python is installed.
"""

import hashlib
import importlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grain
import numpy as np
from jaxtyping import UInt16
from tokenizers import Tokenizer

from jaxhybrid.chat_template import ChatTemplate
from jaxhybrid.demo.recorder import Message, RecordedCall, Recording
from jaxhybrid.demo.specimens import EXPRESSIONS, HELD_OUT
from jaxhybrid.demo.tokenizer import TEMPLATE
from jaxhybrid.demo.workspace import TOOLS
from jaxhybrid.errors import TraceError
from jaxhybrid.traces.recognise import read_file
from jaxhybrid.traces.trajectory import MessageCall

TRACES = Path(__file__).with_name("traces")

# Other people's packages, tests, and files that are mostly tables.
EXCLUDED_FOLDERS = frozenset({"site-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "__pycache__"})
HELD_OUT_SHARE = 0.04
MAX_FILE_BYTES = 200_000


@dataclass(frozen=True)
class Document:
    """`name` decides whether the document is held out."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        stem = Path(self.name).stem
        if stem in EXPRESSIONS:  # the conversations quote these
            return stem in HELD_OUT
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4]) / 2**32 < HELD_OUT_SHARE


def library_documents() -> Iterator[Document]:
    """The standard library's modules and the language topics of `help()`, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.isdisjoint(relative.parts) and 0 < path.stat().st_size <= MAX_FILE_BYTES:
            yield Document(relative.as_posix(), path.read_text(encoding="utf-8", errors="replace"))
    topics = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield Document(f"topic/{name}", topics[name])


def conversation_documents(recordings: Iterable[Recording]) -> Iterator[Document]:
    return (_conversation(recording.id, recording.calls) for recording in recordings)


def shipped_conversations() -> Iterator[Document]:
    """The package's own trajectories, none of which is trained on."""
    for file in sorted(TRACES.glob("*.json")):
        for item in read_file(file):
            if isinstance(item, TraceError):
                raise item
            yield _conversation(item.id, [call for call in item.calls if isinstance(call, MessageCall)])


def _conversation(name: str, calls: Sequence[RecordedCall | MessageCall]) -> Document:
    """The longest context with the answer to it, rendered with all reasoning."""
    last = max(calls, key=lambda call: len(call.messages))
    return Document(name, render([*last.messages, last.response]))


def render(messages: Sequence[Message]) -> str:
    template = ChatTemplate.compile(TEMPLATE.read_text(encoding="utf-8"), TEMPLATE.name, {})
    return template.render(messages, TOOLS, {"preserve_thinking": True}, add_generation_prompt=False)


def token_stream(tokenizer: Tokenizer, documents: Iterable[Document]) -> UInt16[np.ndarray, " tokens"]:
    """All documents one after another, each opened by <|endoftext|>."""
    parts = [tokenizer.encode(f"<|endoftext|>{document.text}").ids for document in documents]
    return np.concatenate([np.asarray(part, np.uint16) for part in parts])


def training_batches(
    stream: UInt16[np.ndarray, " tokens"], window: int, batch: int, seed: int, start: int = 0
) -> Iterator[UInt16[np.ndarray, "batch window"]]:
    """Endless batches of windows cut from the stream, shuffled anew each epoch; `start` batches are passed over."""
    windows = stream[: len(stream) // window * window].reshape(-1, window)
    data = grain.MapDataset.source(windows).shuffle(seed=seed).repeat().batch(batch)
    for step in range(start, len(data)):
        yield data[step]
