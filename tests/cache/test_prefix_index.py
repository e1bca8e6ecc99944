import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from jaxhybrid.cache.prefix_index import Checkpoint, PrefixIndex
from jaxhybrid.errors import ConfigError, ReleasedError, TokenError

IDENTITIES = st.sampled_from(["a", b"b"])
TOKENS = st.lists(st.integers(0, 2), max_size=9)


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class NaiveIndex:
    """What PrefixIndex promises, by scanning lists: paths in order of insertion, checkpoints in order of use."""

    def __init__(self):
        self.paths: list[tuple[object, tuple]] = []
        self.checkpoints: list[tuple[object, tuple, Checkpoint]] = []

    def insert(self, identity, tokens):
        if tokens:
            self.paths = [path for path in self.paths if path != (identity, tokens)] + [(identity, tokens)]

    def match(self, identity, tokens, limit):
        known = [path for owner, path in self.paths if owner == identity]
        matched = max((common(path, tokens) for path in known), default=0)
        leaving = [path for path in known if common(path, tokens) == matched and len(path) > matched]
        expected = leaving[-1][matched] if leaving and matched < len(tokens) else None
        held = [
            (len(path), checkpoint)
            for owner, path, checkpoint in self.checkpoints
            if owner == identity and tokens[: len(path)] == path and len(path) <= limit
        ]
        points = [checkpoint for _, checkpoint in sorted(held, key=lambda pair: pair[0])]
        return matched, points, expected

    def find(self, identity, tokens):
        return next((c for owner, path, c in self.checkpoints if (owner, path) == (identity, tokens)), None)

    def refresh(self, checkpoint):
        self.checkpoints.sort(key=lambda entry: entry[2] is checkpoint)  # stable: the rest keeps its order

    def distinct_tokens(self):
        return len({(owner, path[:n]) for owner, path in self.paths for n in range(1, len(path) + 1)})


class IndexAgainstNaive(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.index: PrefixIndex[int] = PrefixIndex()
        self.naive = NaiveIndex()
        self.payload = 0

    @rule(identity=IDENTITIES, tokens=TOKENS)
    def insert(self, identity, tokens):
        self.index.insert(identity, np.array(tokens, np.int32))
        self.naive.insert(identity, tuple(tokens))

    @rule(identity=IDENTITIES, tokens=TOKENS, limit=st.none() | st.integers(0, 9))
    def match(self, identity, tokens, limit):
        found = self.index.match(identity, np.array(tokens, np.int32), limit=limit)
        matched, points, expected = self.naive.match(identity, tuple(tokens), len(tokens) if limit is None else limit)
        assert (found.matched, found.next_known_token) == (matched, expected)
        assert found.checkpoint is (points[-1] if points else None)
        if limit is None:
            assert self.index.resume_points(identity, tokens) == points
        assert found.gap == found.matched - found.resumed

    @rule(
        target=held,
        identity=IDENTITIES,
        tokens=TOKENS.filter(len),
        pinned=st.booleans(),
        trajectory=st.sampled_from([None, "run-1", "run-2"]),
    )
    def attach(self, identity, tokens, pinned, trajectory):
        self.payload += 1
        existing = self.naive.find(identity, tuple(tokens))
        pins = existing.pins if existing else 0
        checkpoint = self.index.attach(
            identity, np.array(tokens, np.int32), self.payload, "prompt_end", pinned=pinned, trajectory=trajectory
        )
        self.naive.insert(identity, tuple(tokens))
        if existing is None:
            assert checkpoint.payload == self.payload
            assert (checkpoint.identity, checkpoint.length) == (identity, len(tokens))
            self.naive.checkpoints.append((identity, tuple(tokens), checkpoint))
        else:
            assert checkpoint is existing
        assert checkpoint.pins == pins + pinned
        self.naive.refresh(checkpoint)
        return checkpoint

    @rule(checkpoint=held, verb=st.sampled_from(["touch", "pin", "unpin"]))
    def use(self, checkpoint, verb):
        if not checkpoint.alive or (verb == "unpin" and not checkpoint.pinned):
            with pytest.raises(ReleasedError, match=r"was removed from the index|is not pinned"):
                getattr(self.index, verb)(checkpoint)
            return
        pins = checkpoint.pins
        getattr(self.index, verb)(checkpoint)
        change = {"touch": 0, "pin": 1, "unpin": -1}[verb]
        assert checkpoint.pins == pins + change
        if verb == "touch" or pins == 0 or checkpoint.pins == 0:
            self.naive.refresh(checkpoint)

    @rule(checkpoint=held)
    def remove(self, checkpoint):
        if not checkpoint.alive:
            with pytest.raises(ReleasedError, match="was removed from the index"):
                self.index.remove(checkpoint)
            return
        assert self.index.remove(checkpoint) == checkpoint.payload
        assert not checkpoint.alive
        self.naive.checkpoints = [entry for entry in self.naive.checkpoints if entry[2] is not checkpoint]

    @rule(identity=st.none() | IDENTITIES, trajectory=st.sampled_from([None, "run-1"]))
    def drop(self, identity, trajectory):
        def doomed(entry):
            return identity in (None, entry[0]) and trajectory in (None, entry[2].trajectory)

        expected = [entry[2].payload for entry in self.naive.checkpoints if doomed(entry)]
        assert sorted(self.index.drop(identity=identity, trajectory=trajectory)) == sorted(expected)
        self.naive.checkpoints = [entry for entry in self.naive.checkpoints if not doomed(entry)]
        needed = [(owner, path) for owner, path, _ in self.naive.checkpoints]
        kept = []
        for owner, path in self.naive.paths:  # cut each path back to the deepest boundary that is still needed
            cut = max((len(p) for o, p in needed if o == owner and path[: len(p)] == p), default=0)
            kept.append((owner, path if identity not in (None, owner) else path[:cut]))
        self.naive.paths = []
        for owner, path in kept:
            self.naive.insert(owner, path)

    @invariant()
    def same_checkpoints(self):
        entries = self.naive.checkpoints
        unpinned = [c for _, _, c in entries if not c.pinned]
        assert len(self.index) == len(entries)
        assert list(self.index) == unpinned + [c for _, _, c in entries if c.pinned]
        assert self.index.lru() is (unpinned[0] if unpinned else None)
        assert self.index.known_tokens == self.naive.distinct_tokens()
        for _, path, checkpoint in entries:
            assert tuple(self.index.tokens(checkpoint)) == path

    @invariant()
    def tree_is_compact(self):
        nodes = [node for root in self.index._roots.values() for node in root.children.values()]
        assert all(root.children for root in self.index._roots.values())
        while nodes:
            node = nodes.pop()
            assert node.checkpoint is not None or len(node.children) != 1
            assert (node in self.index._bare) == (node.checkpoint is None and not node.children)
            assert all(child.parent is node and child.start == node.end for child in node.children.values())
            nodes.extend(node.children.values())


TestIndexAgainstNaive = IndexAgainstNaive.TestCase
TestIndexAgainstNaive.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    program=st.lists(st.tuples(st.sampled_from(["insert", "attach", "remove"]), IDENTITIES, TOKENS.filter(len))),
    max_tokens=st.integers(0, 12),
)
def test_bounded_memory_keeps_paths_to_checkpoints(program, max_tokens):
    index, kept = PrefixIndex(max_tokens=max_tokens), {}
    for step, (verb, identity, tokens) in enumerate(program):
        if verb == "insert":
            index.insert(identity, tokens)
        elif verb == "attach":
            kept[identity, tuple(tokens)] = index.attach(identity, tokens, step, "every")
        elif (identity, tuple(tokens)) in kept:
            index.remove(kept.pop((identity, tuple(tokens))))
        needed = {(owner, path[:n]) for owner, path in kept for n in range(1, len(path) + 1)}
        assert index.known_tokens <= max(max_tokens, len(needed))
        for (owner, path), checkpoint in kept.items():
            assert index.match(owner, path).checkpoint is checkpoint


def test_least_recently_inserted_path_is_forgotten_first():
    index = PrefixIndex(max_tokens=10)
    index.insert("a", [1, 2, 3, 4])
    index.insert("a", [5, 6, 7])
    index.insert("a", [1, 2])  # part of the first path: keeps all of it
    index.insert("a", [8, 9, 10, 11, 12, 13])
    assert index.match("a", [5, 6, 7]).matched == 0
    assert index.match("a", [1, 2, 3, 4]).matched == 4
    assert index.known_tokens == 10


def test_a_path_longer_than_the_bound_is_kept_only_for_a_checkpoint():
    index = PrefixIndex(max_tokens=3)
    index.insert("a", [1, 2, 3, 4])
    assert index.known_tokens == 0
    checkpoint = index.attach("a", [1, 2, 3, 4, 5], "state", "prompt_end")
    assert index.known_tokens == 5
    index.remove(checkpoint)
    assert index.known_tokens == 0


def test_hit_refreshes_the_checkpoint_used_and_not_its_ancestors():
    index = PrefixIndex()
    system = index.attach("a", [1, 2], "system", "turn_start")
    first = index.attach("a", [1, 2, 3], "first", "prompt_end")
    second = index.attach("a", [1, 2, 4], "second", "prompt_end")
    index.touch(first)
    assert list(index) == [system, second, first]


def test_leaving_a_known_path_inside_an_edge_and_at_a_node():
    index = PrefixIndex()
    index.insert("a", [1, 2, 3, 4])
    inside = index.match("a", [1, 2, 9])
    assert (inside.matched, inside.next_known_token, inside.left_known_path) == (2, 3, True)
    index.insert("a", [1, 2, 5])
    assert index.match("a", [1, 2, 9]).next_known_token == 5
    index.insert("a", [1, 2, 3])
    assert index.match("a", [1, 2, 9]).next_known_token == 3
    for growing in ([1, 2], [1, 2, 3, 4, 9]):  # ends on a known path, or goes on where the known path ends
        assert not index.match("a", growing).left_known_path


def test_second_attach_keeps_the_first_payload():
    index = PrefixIndex()
    first, own = object(), object()
    checkpoint = index.attach("a", [1, 2], first, "turn_start", trajectory="run-1")
    again = index.attach("a", [1, 2], own, "prompt_end", trajectory="run-2", pinned=True)
    assert again is checkpoint
    assert (again.payload, again.kind, again.trajectory, again.pins) == (first, "turn_start", "run-1", 1)
    assert index.lru() is None


def test_drop_by_tenant_forgets_what_no_other_checkpoint_needs():
    index = PrefixIndex()
    index.attach("a", [1, 2, 3, 4], "x", "prompt_end", tenant="x", pinned=True)
    index.attach("a", [1, 2, 5], "y", "prompt_end", tenant="y")
    index.insert("a", [7, 8])
    assert index.drop(tenant="x") == ["x"]
    assert index.match("a", [1, 2, 3, 4]).matched == 2
    assert index.match("a", [7, 8]).matched == 0
    assert [checkpoint.payload for checkpoint in index] == ["y"]


def test_index_keeps_no_view_of_the_callers_array():
    index, tokens = PrefixIndex(), np.arange(10, dtype=np.int32)
    index.attach("a", tokens[:6], "state", "prompt_end")
    index.insert("a", tokens)
    tokens[:] = 0
    assert index.match("a", np.arange(10)).matched == 10


def test_one_long_prompt_is_matched_and_kept_in_milliseconds():
    index, tokens = PrefixIndex(), np.arange(120_000, dtype=np.int32)
    grid = range(1_600, tokens.size + 1, 1_600)
    index.insert("a", tokens)
    for n in grid:
        index.attach("a", tokens[:n], n, "every")
    tokens[-1] = -1
    start = time.process_time()
    for _ in range(10):
        assert index.match("a", tokens).resumed == grid[-1] - 1_600
        index.insert("a", tokens)
    assert (time.process_time() - start) / 10 < 0.02


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2]], r"integers of shape \[n\], got int64 \[1, 2\]"),
        ([1.0, 2.0], r"integers of shape \[n\], got float64 \[2\]"),
        ([1, 2**31], "must fit int32, got values from 1 to 2147483648"),
        ([[1], [2, 3]], r"integers of shape \[n\]"),
    ],
)
def test_what_is_not_a_token_sequence_is_refused(tokens, message):
    with pytest.raises(TokenError, match=message):
        PrefixIndex().match("a", tokens)


def test_no_checkpoint_at_boundary_zero_and_no_negative_bound():
    with pytest.raises(TokenError, match="at least one token, got none"):
        PrefixIndex().attach("a", [], "state", "prompt_end")
    with pytest.raises(ConfigError, match="max_tokens must be at least 0 or None, got -1"):
        PrefixIndex(max_tokens=-1)


def test_beyond_finds_state_that_reaches_past_the_tokens() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.attach("a", [1, 2, 3, 4, 5], "long", "prompt_end")
    index.attach("a", [1, 2, 9], "other", "prompt_end")
    index.insert("a", [1, 2, 7, 7])
    assert index.beyond("a", [1, 2, 3]).payload == "long"
    assert index.beyond("a", [1, 2, 3, 4, 5]).payload == "long"
    assert index.beyond("a", [1, 2, 9]).payload == "other"
    assert index.beyond("a", [1, 2]).payload in ("long", "other")
    assert index.beyond("a", [1, 2, 7]) is None
    assert index.beyond("a", [1, 2, 3, 4, 5, 6]) is None
    assert index.beyond("b", [1]) is None
