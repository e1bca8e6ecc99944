"""Which earlier call each call of a trajectory continues or forks from, found by content."""

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from jaxhybrid.traces.trajectory import BlockCall, Message, MessageCall, TextCall

MIN_SHARED_CHARACTERS = 64
"""A shorter opening in common is a role label or a greeting, not a context to fork from, but for a whole prompt."""

C = TypeVar("C", MessageCall, TextCall, BlockCall)


class PrefixTrie:
    """Paths of hashable items. A node remembers the first index that passed through, and the latest of each branch."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, Hashable], int] = {}
        self._first: list[int | None] = [None]
        self._latest: dict[tuple[int, str], int] = {}

    def deepest(self, path: Iterable[Hashable], branch: str = "main") -> tuple[int, int | None]:
        """Length of the longest known opening of `path`, and an index that has it (None at length 0).

        Of several it is the latest of `branch`; if none is of that branch, the first.
        """
        node = depth = 0
        for item in path:
            child = self._nodes.get((node, item))
            if child is None:
                break
            node, depth = child, depth + 1
        return depth, self._latest.get((node, branch), self._first[node])

    def insert(self, path: Iterable[Hashable], index: int, branch: str = "main") -> None:
        node = 0
        for item in path:
            child = self._nodes.setdefault((node, item), len(self._first))
            if child == len(self._first):
                self._first.append(index)
            node = child
            self._latest[node, branch] = index


def with_parents(calls: Sequence[C]) -> tuple[C, ...]:
    """The same calls, each with the `parent` that its content shows. All calls are of one kind."""
    if calls and isinstance(calls[0], TextCall):
        parents = _text_parents([call.text for call in calls if isinstance(call, TextCall)])
    else:
        parents = _path_parents(calls)
    return tuple(replace(call, parent=parent) for call, parent in zip(calls, parents, strict=True))


def _path_parents(calls: Sequence[MessageCall | TextCall | BlockCall]) -> list[int | None]:
    trie = PrefixTrie()
    keys: dict[int, str] = {}
    parents: list[int | None] = []
    for index, call in enumerate(calls):
        if isinstance(call, BlockCall):
            prompt: list[Hashable] = call.blocks.tolist()
            shortest, path = 1, prompt
        else:
            assert isinstance(call, MessageCall)
            # Tools are rendered into the prompt: other tools make another context, however alike the messages.
            prompt = [json.dumps(call.tools), *(_key(message, keys) for message in call.messages)]
            shortest, path = 2, [*prompt, _key(call.response, keys)]
        depth, latest = trie.deepest(prompt, call.branch)
        parents.append(latest if depth >= shortest else None)
        trie.insert(path, index, call.branch)
    return parents


def _key(message: Message, known: dict[int, str]) -> str:
    """The message as canonical JSON, computed once per object (calls of a trajectory share their messages)."""
    key = known.get(id(message))
    if key is None:
        key = known[id(message)] = json.dumps(message, sort_keys=True)
    return key


def with_lines(calls: Sequence[TextCall]) -> tuple[TextCall, ...]:
    """Calls that know their parents, with each line of conversation a branch: for logs that mix several unnamed roles.

    A call without a parent opens a line, "main" or "line-2" and so on; others are of their parent's.
    """
    lined: list[TextCall] = []
    lines = 0
    for call in calls:
        lines += call.parent is None
        opened = "main" if lines == 1 else f"line-{lines}"
        lined.append(replace(call, branch=opened if call.parent is None else lined[call.parent].branch))
    return tuple(lined)


def _text_parents(texts: Sequence[str]) -> list[int | None]:
    parents: list[int | None] = []
    for index, text in enumerate(texts):
        best, parent = 0, None
        for earlier in range(index - 1, -1, -1):
            other = texts[earlier]
            if other[: best + 1] == text[: best + 1] and best < min(len(text), len(other)):
                shared = _shared_length(other, text)
                if shared >= min(MIN_SHARED_CHARACTERS, len(other)):
                    best, parent = shared, earlier
        parents.append(parent)
    return parents


def _shared_length(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
