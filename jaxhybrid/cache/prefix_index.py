"""A radix tree over token ids that says how much of a prompt is known, and from where it can be resumed.

One tree per *identity* (whatever changes the state transition: weights, tenant, ...). Two things live in a tree:

- the *known path*: every token sequence seen, whether or not any state of it is kept;
- *checkpoints*: payloads bound to exactly one boundary (a token count) of a known path.

A lookup reports both, so that a caller can tell tokens never seen from tokens seen whose state was not kept (the
recomputation gap). The tree holds no arrays but token ids, and never looks into a payload.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Int32

from jaxhybrid.errors import ConfigError, ReleasedError, TokenError

_WIDTH = 4  # bytes of a token

T = TypeVar("T")
Tokens = Int32[np.ndarray, "n"]


@dataclass(eq=False, slots=True)
class Checkpoint(Generic[T]):
    """A payload that belongs to the first `length` tokens of a path. `pins` > 0 keeps it from `PrefixIndex.lru`."""

    identity: Hashable
    length: int
    payload: T
    kind: str
    trajectory: str | None = None
    tenant: str | None = None
    pins: int = 0
    _node: _Node[T] | None = field(default=None, repr=False)

    @property
    def pinned(self) -> bool:
        return self.pins > 0

    @property
    def alive(self) -> bool:
        """False once the checkpoint has been removed from its index."""
        return self._node is not None


@dataclass(frozen=True, slots=True)
class Match(Generic[T]):
    """What an index knows of a token sequence.

    matched: length in tokens of the longest known prefix.
    checkpoint: the deepest one on that prefix, or None.
    next_known_token: set where the sequence *leaves* a known path, that is where both go on from `matched` with
        different tokens: the token that the most recently inserted known path has there.
    """

    matched: int
    checkpoint: Checkpoint[T] | None
    next_known_token: int | None

    @property
    def resumed(self) -> int:
        """Boundary in tokens that computation can resume from; 0 without a checkpoint."""
        return 0 if self.checkpoint is None else self.checkpoint.length

    @property
    def gap(self) -> int:
        """Recomputation gap: tokens that are known, but have to be computed again."""
        return self.matched - self.resumed

    @property
    def left_known_path(self) -> bool:
        return self.next_known_token is not None


@dataclass(eq=False, slots=True)
class _Node(Generic[T]):
    """The tokens between two boundaries: `edge` leads from the parent's `end` to this node's `end`.

    Tokens are held as the bytes of an int32 array: whole edges, most of what a walk meets, then compare without the
    overhead of NumPy calls.

    Invariant outside of an update: a node other than a root has a checkpoint, or no child, or several.
    """

    identity: Hashable
    edge: bytes
    end: int
    parent: _Node[T] | None
    # By first token of the child's edge; the most recently inserted path last.
    children: dict[bytes, _Node[T]] = field(default_factory=dict)
    checkpoint: Checkpoint[T] | None = None

    @property
    def start(self) -> int:
        return self.end - len(self.edge) // _WIDTH

    @property
    def key(self) -> bytes:
        return self.edge[:_WIDTH]


class PrefixIndex(Generic[T]):
    """Known paths and checkpoints by content; see the module's docstring.

    max_tokens bounds the tokens remembered: beyond it, paths that lead to no checkpoint are forgotten, least recently
    inserted first (a path whose last checkpoint is removed counts as inserted then). The path to a checkpoint is never
    forgotten, so checkpoints alone can exceed the bound. None: no bound.

    Only `attach` and `touch` refresh a checkpoint's place in the order of use, and only that checkpoint's: not those
    of the boundaries before it. `match` changes nothing. Token sequences are best passed as int32 arrays; anything
    else is converted, token by token.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        if max_tokens is not None and max_tokens < 0:
            raise ConfigError(f"max_tokens must be at least 0 or None, got {max_tokens}")
        self.max_tokens = max_tokens
        self._roots: dict[Hashable, _Node[T]] = {}
        self._known_tokens = 0
        # Both in order of use, oldest first.
        self._unpinned: OrderedDict[Checkpoint[T], None] = OrderedDict()
        self._pinned: OrderedDict[Checkpoint[T], None] = OrderedDict()
        # Leaves without a checkpoint, in order of insertion, oldest first: what may be forgotten.
        self._bare: OrderedDict[_Node[T], None] = OrderedDict()

    def __len__(self) -> int:
        """Number of checkpoints."""
        return len(self._unpinned) + len(self._pinned)

    def __iter__(self) -> Iterator[Checkpoint[T]]:
        """All checkpoints: the unpinned from the least to the most recently used, then the pinned likewise."""
        return iter([*self._unpinned, *self._pinned])

    @property
    def known_tokens(self) -> int:
        """Number of token ids remembered, over all identities; a shared prefix counts once."""
        return self._known_tokens

    def match(self, identity: Hashable, tokens: Tokens | Sequence[int], *, limit: int | None = None) -> Match[T]:
        """Looks up the longest known prefix of `tokens` and the deepest checkpoint on it.

        limit: ignore checkpoints beyond this boundary (a caller that needs the logits of the last token has to compute
        at least that one, and passes `len(tokens) - 1`). It does not shorten `matched`.
        """
        data = _as_bytes(tokens)
        root = self._roots.get(identity)
        if root is None:
            return Match(matched=0, checkpoint=None, next_known_token=None)
        node, matched, passed = _descend(root, data)
        known = None
        if matched < len(data) // _WIDTH:
            if matched < node.end:
                known = _token_at(node.edge, matched - node.start)
            elif node.children:
                known = _token_at(next(reversed(node.children)), 0)
        deepest = next((each for each in reversed(passed) if limit is None or each.length <= limit), None)
        return Match(matched=matched, checkpoint=deepest, next_known_token=known)

    def resume_points(self, identity: Hashable, tokens: Tokens | Sequence[int]) -> list[Checkpoint[T]]:
        """Every checkpoint that `tokens` could be resumed from, shallowest first."""
        root = self._roots.get(identity)
        return [] if root is None else _descend(root, _as_bytes(tokens))[2]

    def beyond(self, identity: Hashable, tokens: Tokens | Sequence[int]) -> Checkpoint[T] | None:
        """A checkpoint whose own tokens begin with all of `tokens`; of several, one on the most recent path.

        State that can be cut short (attention's keys and values) serves any boundary before its own.
        """
        root, data = self._roots.get(identity), _as_bytes(tokens)
        if root is None:
            return None
        node, matched, _ = _descend(root, data)
        if matched < len(data) // _WIDTH:
            return None
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node.checkpoint is not None and node.end >= matched:
                return node.checkpoint
            waiting += node.children.values()
        return None

    def insert(self, identity: Hashable, tokens: Tokens | Sequence[int]) -> None:
        """Makes `tokens` known."""
        data = _as_bytes(tokens)
        if data:
            self._grow(identity, data)
            self._forget_excess()

    def attach(
        self,
        identity: Hashable,
        tokens: Tokens | Sequence[int],
        payload: T,
        kind: str,
        *,
        pinned: bool = False,
        trajectory: str | None = None,
        tenant: str | None = None,
    ) -> Checkpoint[T]:
        """Makes `tokens` known and keeps `payload` at the boundary `len(tokens)`.

        Where that boundary has a checkpoint already, it stays as it is, counts as used, takes the pin if one was asked
        for, and is returned: the caller sees `result.payload is not payload` and releases its own.

        Raises TokenError when `tokens` is empty: no state belongs to boundary 0.
        """
        data = _as_bytes(tokens)
        if not data:
            raise TokenError("a checkpoint needs at least one token, got none")
        node = self._grow(identity, data)
        length = len(data) // _WIDTH
        if node.end > length:
            node = _split(node, length)
        if node.checkpoint is None:
            node.checkpoint = Checkpoint(identity, node.end, payload, kind, trajectory, tenant, _node=node)
            self._unpinned[node.checkpoint] = None
            self._settle(node)
        self.touch(node.checkpoint)
        if pinned:
            self.pin(node.checkpoint)
        self._forget_excess()
        return node.checkpoint

    def touch(self, checkpoint: Checkpoint[T]) -> None:
        """Counts a checkpoint as used now."""
        _node_of(checkpoint)
        (self._pinned if checkpoint.pinned else self._unpinned).move_to_end(checkpoint)

    def pin(self, checkpoint: Checkpoint[T]) -> None:
        """Keeps a checkpoint from `lru` until it has been unpinned as often as it was pinned."""
        _node_of(checkpoint)
        self._unpinned.pop(checkpoint, None)
        self._pinned[checkpoint] = None
        checkpoint.pins += 1

    def unpin(self, checkpoint: Checkpoint[T]) -> None:
        """Takes one pin back; the last one counts as a use. Raises ReleasedError when there is none."""
        _node_of(checkpoint)
        if not checkpoint.pinned:
            raise ReleasedError(f"the {checkpoint.kind} checkpoint at token {checkpoint.length} is not pinned")
        checkpoint.pins -= 1
        if not checkpoint.pinned:
            del self._pinned[checkpoint]
            self._unpinned[checkpoint] = None

    def remove(self, checkpoint: Checkpoint[T]) -> T:
        """Takes a checkpoint, pinned or not, out of the index and returns its payload. Its path stays known."""
        node = _node_of(checkpoint)
        del (self._pinned if checkpoint.pinned else self._unpinned)[checkpoint]
        checkpoint._node = node.checkpoint = None
        self._settle(node)
        self._forget_excess()
        return checkpoint.payload

    def lru(self) -> Checkpoint[T] | None:
        """The least recently used checkpoint that is not pinned, or None."""
        return next(iter(self._unpinned), None)

    def drop(
        self, *, identity: Hashable | None = None, trajectory: str | None = None, tenant: str | None = None
    ) -> list[T]:
        """Removes every checkpoint, pinned or not, that fits all that is given, and returns their payloads.

        Known paths carry no labels, and what is deleted must not be found again: so every path that no remaining
        checkpoint needs is forgotten, under `identity`, or everywhere when none is given.
        """
        doomed = [
            checkpoint
            for checkpoint in self
            if identity in (None, checkpoint.identity)
            and trajectory in (None, checkpoint.trajectory)
            and tenant in (None, checkpoint.tenant)
        ]
        payloads = [self.remove(checkpoint) for checkpoint in doomed]
        for leaf in [leaf for leaf in self._bare if identity in (None, leaf.identity)]:
            self._forget(leaf)
        return payloads

    def tokens(self, checkpoint: Checkpoint[T]) -> Tokens:
        """The token ids that a checkpoint's payload belongs to. [checkpoint.length] int32, read-only"""
        node: _Node[T] | None = _node_of(checkpoint)
        edges = []
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return np.frombuffer(b"".join(reversed(edges)), np.int32)

    def _grow(self, identity: Hashable, data: bytes) -> _Node[T]:
        """Makes the tokens known, as the most recent path; returns the node whose edge holds the last of them."""
        root = self._roots.get(identity)
        if root is None:
            root = self._roots[identity] = _Node(identity, b"", end=0, parent=None)
        node, matched, _ = _descend(root, data)
        length = len(data) // _WIDTH
        if matched < length:
            rest = data[matched * _WIDTH :]
            if matched < node.end:
                node = _split(node, matched)
            if node in self._bare:
                node.edge += rest
                node.end = length
            else:
                leaf: _Node[T] = _Node(identity, rest, end=length, parent=node)
                node.children[leaf.key] = leaf
                self._bare[leaf] = None
                node = leaf
            self._known_tokens += length - matched
        if node in self._bare:
            self._bare.move_to_end(node)
        child = node
        while child.parent is not None:
            siblings = child.parent.children
            if len(siblings) > 1:
                siblings[child.key] = siblings.pop(child.key)
            child = child.parent
        return node

    def _settle(self, node: _Node[T]) -> None:
        """Restores the invariants at a node that lost or gained a checkpoint, or lost a child."""
        if node.parent is None:
            if not node.children:
                del self._roots[node.identity]
        elif node.checkpoint is not None:
            self._bare.pop(node, None)
        elif not node.children:
            self._bare[node] = None
        elif len(node.children) == 1:
            _merge_into_child(node)

    def _forget(self, leaf: _Node[T]) -> None:
        parent = leaf.parent
        assert parent is not None
        del self._bare[leaf]
        del parent.children[leaf.key]
        self._known_tokens -= leaf.end - parent.end
        self._settle(parent)

    def _forget_excess(self) -> None:
        if self.max_tokens is not None:
            while self._bare and self._known_tokens > self.max_tokens:
                self._forget(next(iter(self._bare)))


def _as_bytes(tokens: Tokens | Sequence[int]) -> bytes:
    """Token ids as the bytes of an int32 array. Raises TokenError for anything but a flat sequence of such ids."""
    try:
        array = np.asarray(tokens)
    except ValueError as error:  # ragged
        raise TokenError(f"expected token ids as integers of shape [n]: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TokenError(f"expected token ids as integers of shape [n], got {array.dtype} {list(array.shape)}")
    if array.size and array.dtype != np.int32 and not (array.min() >= -(2**31) and array.max() < 2**31):
        raise TokenError(f"token ids must fit int32, got values from {array.min()} to {array.max()}")
    return array.astype(np.int32, copy=False).tobytes()


def _token_at(data: bytes, position: int) -> int:
    return int(np.frombuffer(data, np.int32, count=1, offset=position * _WIDTH)[0])


def _node_of(checkpoint: Checkpoint[T]) -> _Node[T]:
    if checkpoint._node is None:
        raise ReleasedError(f"the {checkpoint.kind} checkpoint at token {checkpoint.length} was removed from the index")
    return checkpoint._node


def _descend(root: _Node[T], data: bytes) -> tuple[_Node[T], int, list[Checkpoint[T]]]:
    """Follows tokens down as far as they are known.

    Returns the last node whose edge was entered, the number of tokens matched (less than that node's `end` when the
    edge was left, or the tokens ended, inside it), and the checkpoints passed, shallowest first.
    """
    node, at = root, 0
    passed: list[Checkpoint[T]] = []
    while True:
        child = node.children.get(data[at : at + _WIDTH])
        if child is None:
            return node, node.end, passed
        if not data.startswith(child.edge, at):
            return child, node.end + _common_prefix(child.edge, data[at : at + len(child.edge)]), passed
        node = child
        at += len(child.edge)
        if node.checkpoint is not None:
            passed.append(node.checkpoint)


def _common_prefix(edge: bytes, data: bytes) -> int:
    """Number of leading tokens that agree, where not all of `edge` does."""
    count = min(len(edge), len(data)) // _WIDTH
    differs = np.frombuffer(edge, np.int32, count) != np.frombuffer(data, np.int32, count)
    return int(differs.argmax()) if differs.any() else count


def _split(node: _Node[T], at: int) -> _Node[T]:
    """Cuts a node's edge at boundary `at` and returns the new upper node, which the caller gives a purpose at once."""
    assert node.parent is not None
    cut = (at - node.start) * _WIDTH
    upper: _Node[T] = _Node(node.identity, node.edge[:cut], end=at, parent=node.parent)
    node.parent.children[upper.key] = upper
    node.edge = node.edge[cut:]
    node.parent = upper
    upper.children[node.key] = node
    return upper


def _merge_into_child(node: _Node[T]) -> None:
    (child,) = node.children.values()
    assert node.parent is not None
    child.edge = node.edge + child.edge
    child.parent = node.parent
    node.parent.children[child.key] = child
