"""The pool's promises, against a simulated memory: nobody's state changes under them, and nothing leaks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxhybrid.config import DenseSpec, KimiDeltaSpec, LatentAttentionSpec, LayerSpec
from jaxhybrid.errors import CapacityError, ReleasedError
from jaxhybrid.state.layout import layout_of
from jaxhybrid.state.pool import EMPTY, ZERO_SLOT, Bundle, Reservation, StatePool

LAYERS = (
    LayerSpec(KimiDeltaSpec(2, 3, 4), DenseSpec(5)),
    LayerSpec(LatentAttentionSpec(2, None, 6, 3, 2, 4, False), DenseSpec(5)),
)
PAGE = 4


def small_pool(slots: int = 6, pages: int = 10) -> StatePool:
    return StatePool(layout_of(LAYERS, vocab_size=7), slots, pages, PAGE)


class Memory:
    """What the device would hold: the tokens whose state each slot is, and the token of each page row."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, ...]] = {ZERO_SLOT: ()}
        self.rows: dict[tuple[int, int], int] = {}

    def read(self, bundle: Bundle) -> tuple[tuple[int, ...], list[int | None]]:
        rows = [self.rows.get((bundle.pages[at // PAGE], at % PAGE)) for at in range(bundle.length)]
        return self.slots[bundle.slot], rows

    def write(self, step: Reservation, tokens: list[int]) -> None:
        if step.copied_page is not None:
            source, target = step.copied_page
            for row in range(PAGE):
                if (source, row) in self.rows:
                    self.rows[target, row] = self.rows[source, row]
        self.slots[step.write_slot] = self.slots[step.base.slot] + tuple(tokens)
        for at, token in enumerate(tokens, step.base.length):
            self.rows[step.pages[at // PAGE], at % PAGE] = token


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_holder_ever_sees_another_ones_writes(data: st.DataObject) -> None:
    pool, memory = small_pool(), Memory()
    held: list[tuple[Bundle, tuple[int, ...]]] = [(pool.retain(EMPTY), ())]
    token = 0
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["step", "step", "fork", "release", "abandon", "together"]))
        if not held:
            held.append((pool.retain(EMPTY), ()))
        at = data.draw(st.integers(0, len(held) - 1))
        bundle, tokens = held[at]
        if action == "fork":
            held.append((pool.retain(bundle), tokens))
        elif action == "release":
            pool.release(bundle)
            del held[at]
        else:
            chosen = [at] if action != "together" else list(dict.fromkeys([at, len(held) - 1]))
            steps = []
            for number in chosen:
                count = data.draw(st.integers(1, 6))
                try:
                    steps.append((number, pool.reserve(held[number][0], count)))
                except CapacityError:
                    continue
            assert len({step.write_slot for _, step in steps}) == len(steps)
            for number, step in steps:
                made = 0 if action == "abandon" else data.draw(st.integers(0, step.tokens))
                new = list(range(token, token + made))
                token += made
                if made:
                    memory.write(step, new)
                held[number] = (pool.commit(step, made), held[number][1] + tuple(new))
        for other, expected in held:
            slot_tokens, rows = memory.read(other)
            assert slot_tokens == expected
            assert tuple(rows) == expected
    for bundle, _ in held:
        pool.release(bundle)
    assert pool.live_slots == pool.live_pages == 0


def test_a_fork_moves_nothing_and_its_first_step_copies_one_page_at_most() -> None:
    pool = small_pool()
    parent = pool.commit(pool.reserve(pool.retain(EMPTY), 6), 6)
    child = pool.retain(parent)
    assert pool.counters.kv_bytes_copied == 0
    first = pool.reserve(parent, 1)
    second = pool.reserve(child, 1)
    assert first.copied_page is None
    assert second.copied_page is not None
    pool.commit(first, 1)
    pool.commit(second, 1)
    assert pool.counters.kv_bytes_copied == pool.page_bytes
    assert pool.counters.recurrent_bytes_copied == 0


def test_a_checkpoint_left_behind_is_appended_to_only_after_a_copy() -> None:
    pool = small_pool()
    kept = pool.commit(pool.reserve(pool.retain(EMPTY), 3), 3)
    going = pool.commit(pool.reserve(pool.retain(kept), 1), 1)
    again = pool.reserve(kept, 1)
    assert again.copied_page == (going.pages[-1], again.pages[-1])


def test_the_only_holder_writes_in_place() -> None:
    pool = small_pool()
    bundle = pool.commit(pool.reserve(pool.retain(EMPTY), 3), 3)
    step = pool.reserve(bundle, 1)
    assert not step.moved
    assert step.pages == bundle.pages


def test_too_much_is_refused_and_changes_nothing() -> None:
    pool = small_pool(slots=1, pages=2)
    with pytest.raises(CapacityError, match=r"9 more tokens after 0 need 1 slots and 3 pages of 4, free are 1"):
        pool.reserve(EMPTY, 9)
    assert (pool.free_slots, pool.free_pages) == (1, 2)


def test_releasing_twice_is_refused() -> None:
    pool = small_pool()
    bundle = pool.commit(pool.reserve(pool.retain(EMPTY), 5), 5)
    pool.release(bundle)
    with pytest.raises(ReleasedError, match="the bundle of 5 tokens was released"):
        pool.release(bundle)
    with pytest.raises(ReleasedError, match="was released"):
        pool.retain(bundle)


def test_arrays_are_with_one_owner() -> None:
    pool = small_pool()
    arrays = pool.take()
    with pytest.raises(ReleasedError, match="with another program"):
        pool.take()
    pool.put(arrays)
    with pytest.raises(ReleasedError, match="put back without being taken"):
        pool.put(arrays)


def test_bytes_are_counted_by_kind() -> None:
    pool = small_pool()
    pool.commit(pool.reserve(pool.retain(EMPTY), 5), 5)
    live = pool.live_bytes()
    assert live == {"recurrent": 2 * 3 * 3 * 4, "conv": 3 * 18 * 4, "logits": 7 * 4, "latent": 2 * PAGE * 8 * 4}
    assert sum(live.values()) == pool.layout.bytes_per_slot + 2 * PAGE * pool.layout.bytes_per_token
