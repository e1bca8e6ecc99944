"""Reservations as arrays, and how a prompt is cut into chunks."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxhybrid.engine.dispatch import DISPATCH_TOKENS, address_of, chunk_plan, page_copies
from jaxhybrid.state.pool import NULL_PAGE, NULL_SLOT, Bundle, Reservation


def step(length: int, slot: int, write: int, pages: tuple[int, ...], copied: tuple[int, int] | None = None):
    return Reservation(Bundle(length, slot, pages), 3, write, pages, copied)


def test_an_address_is_padded_with_null_slots_and_pages() -> None:
    address = address_of([step(20, 5, 6, (9, 8, 7)), step(0, 1, 4, (3,))], [3, 2], rows=4, width=5)
    columns = {name: np.asarray(getattr(address, name)) for name in ("starts", "lengths", "read_slots", "write_slots")}
    assert {name: column.tolist() for name, column in columns.items()} == {
        "starts": [20, 0, 0, 0],
        "lengths": [3, 2, 0, 0],
        "read_slots": [5, 1, NULL_SLOT, NULL_SLOT],
        "write_slots": [6, 4, NULL_SLOT, NULL_SLOT],
    }
    assert np.asarray(address.page_table).tolist() == [
        [9, 8, 7, NULL_PAGE, NULL_PAGE],
        [3, *[NULL_PAGE] * 4],
        [NULL_PAGE] * 5,
        [NULL_PAGE] * 5,
    ]
    assert all(column.dtype == np.int32 for column in [*columns.values(), address.page_table])


def test_an_address_wants_one_length_a_step() -> None:
    with pytest.raises(ValueError, match="zip"):
        address_of([step(0, 1, 4, (3,))], [], rows=1, width=1)


@pytest.mark.parametrize(
    ("copies", "source", "target"),
    [
        ([(2, 7)], [2], [7]),
        ([(2, 7), None, (3, 9)], [2, 3], [7, 9]),
        ([(2, 7), (3, 9), (4, 8)], [2, 3, 4, NULL_PAGE], [7, 9, 8, NULL_PAGE]),
    ],
)
def test_page_copies_are_padded_to_a_power_of_two(copies: list, source: list[int], target: list[int]) -> None:
    found = page_copies([step(4, 2, 3, (1,), copied) for copied in copies])
    assert found is not None
    assert [part.tolist() for part in found] == [source, target]
    assert found[0].dtype == np.int32


def test_no_page_to_copy_is_none() -> None:
    assert page_copies([]) is None
    assert page_copies([step(4, 2, 3, (1,))]) is None


def cost(plan: tuple[int, ...]) -> int:
    return sum(plan) + DISPATCH_TOKENS * len(plan)


@functools.cache
def cheapest(tokens: int, buckets: tuple[int, ...]) -> int:
    """Over every multiset of chunks that holds the tokens and would not without one of them."""
    most = -(-tokens // buckets[0])
    plans = itertools.chain.from_iterable(
        itertools.combinations_with_replacement(buckets, count) for count in range(1, most + 1)
    )
    return min(cost(plan) for plan in plans if sum(plan) >= tokens)


@given(
    tokens=st.integers(1, 90),
    buckets=st.sets(st.sampled_from([12, 16, 20, 33, 40, 64, 90, 130]), min_size=1, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_a_plan_covers_the_tokens_at_the_least_cost(tokens: int, buckets: set[int]) -> None:
    sizes = tuple(sorted(buckets))
    plan = chunk_plan(tokens, sizes)
    assert set(plan) <= buckets
    if tokens >= 4 * sizes[-1]:
        assert plan == (sizes[-1],)
        return
    assert sum(plan) >= tokens
    assert sum(plan) - min(plan) < tokens  # no chunk is all padding
    if tokens <= sizes[-1]:
        assert cost(plan) == cheapest(tokens, sizes)


@pytest.mark.parametrize(
    ("tokens", "plan"),
    [
        (1, (16,)),
        (16, (16,)),
        (33, (64,)),  # three chunks of 16 would start three programs
        (64, (64,)),
        (65, (64, 16)),
        (80, (64, 16)),
        (512, (512,)),
        (513, (512, 16)),
        (1100, (512, 512, 64, 16)),
    ],
)
def test_plans_of_the_default_chunks(tokens: int, plan: tuple[int, ...]) -> None:
    assert sorted(chunk_plan(tokens, (16, 64, 256, 512)), reverse=True) == sorted(plan, reverse=True)


def test_a_long_prompt_is_prefilled_step_by_step() -> None:
    """The engine asks again after every chunk: following the first of each plan covers any prompt exactly."""
    buckets = (16, 64, 256, 512)
    for tokens in (1, 63, 700, 5000, 100_003):
        left = tokens
        while left:
            chunk = chunk_plan(left, buckets)[0]
            assert chunk in buckets
            left -= min(chunk, left)
