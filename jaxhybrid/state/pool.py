"""The state pool: who holds which slot and page, and the one set of device arrays they index.

Host bookkeeping only. Device programs receive the arrays by `take` (they are donated) and hand them back by `put`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxhybrid.errors import CapacityError, ReleasedError
from jaxhybrid.state.arrays import PoolArrays, PoolPlaces, bytes_by_kind, pool_arrays
from jaxhybrid.state.layout import StateLayout

NULL_SLOT = 0  # padding reads and writes it
ZERO_SLOT = 1  # the state of no tokens: read by new sequences, written by nobody
RESERVED_SLOTS = 2
NULL_PAGE = 0


@dataclass(frozen=True)
class Bundle:
    """All state of one prefix of `length` tokens: a slot for what is of fixed size, pages for what grows.

    Immutable; it names memory that `StatePool` counts references to.
    """

    length: int
    slot: int
    pages: tuple[int, ...]


EMPTY = Bundle(0, ZERO_SLOT, ())


def cut_short(bundle: Bundle, length: int, page_size: int) -> Bundle:
    """The state of the first `length` tokens, where all of it is token-indexed: the pages up to there, and no slot.

    The next token's logits are not among it: at least one more token must be processed.
    """
    return Bundle(length, ZERO_SLOT, bundle.pages[: -(-length // page_size)])


@dataclass(frozen=True)
class Reservation:
    """Room for one sequence to go on from `base`: where the step reads, where it writes, and what must be copied.

    `pages` cover base.length + tokens. `copied_page` is (from, to) if the partly filled last page had to be copied.
    """

    base: Bundle
    tokens: int
    write_slot: int
    pages: tuple[int, ...]
    copied_page: tuple[int, int] | None

    @property
    def moved(self) -> bool:
        """Whether the step writes its fixed-size state to another slot than it reads."""
        return self.write_slot != self.base.slot


@dataclass(frozen=True)
class Need:
    """Free slots and pages that a step asks for."""

    slots: int
    pages: int


@dataclass
class PoolCounters:
    """Bytes and events since the pool was made."""

    recurrent_bytes_copied: int = 0
    kv_bytes_copied: int = 0
    state_moves: int = 0


class StatePool:
    """`slots` and `pages` are what sequences and checkpoints can use; the null and zero slot and null page come on top.

    `poison` fills freed slots and pages with NaN (a function given the lists of both), so that a stale read shows.
    """

    def __init__(
        self,
        layout: StateLayout,
        slots: int,
        pages: int,
        page_size: int,
        poison: Callable[[PoolArrays, list[int], list[int]], PoolArrays] | None = None,
        places: PoolPlaces | None = None,
    ) -> None:
        self.layout, self.page_size = layout, page_size
        self.counters = PoolCounters()
        self._arrays: PoolArrays | None = pool_arrays(layout, slots + RESERVED_SLOTS, pages + 1, page_size, places)
        self._slot_refs = np.zeros(slots + RESERVED_SLOTS, np.int32)
        self._page_refs = np.zeros(pages + 1, np.int32)
        self._filled = np.zeros(pages + 1, np.int32)  # rows of each page that some bundle has written or claimed
        self._free_slots = list(range(slots + RESERVED_SLOTS - 1, RESERVED_SLOTS - 1, -1))
        self._free_pages = list(range(pages, 0, -1))
        self._poison = poison

    # The device arrays

    def take(self) -> PoolArrays:
        """The arrays, to be donated to one program. Raises ReleasedError if a program already has them."""
        if self._arrays is None:
            raise ReleasedError("the state pool's arrays are with another program and were not put back")
        arrays, self._arrays = self._arrays, None
        return arrays

    def put(self, arrays: PoolArrays) -> None:
        """The arrays as a program returned them."""
        if self._arrays is not None:
            raise ReleasedError("the state pool's arrays were put back without being taken")
        self._arrays = arrays

    # References

    def retain(self, bundle: Bundle) -> Bundle:
        """One more holder of everything the bundle names. Raises ReleasedError if it names freed memory."""
        self._check_live(bundle)
        self._slot_refs[bundle.slot] += 1
        self._page_refs[list(bundle.pages)] += 1
        return bundle

    def release(self, bundle: Bundle) -> None:
        """One holder less. Raises ReleasedError, changing nothing, if nobody holds the bundle."""
        self._check_live(bundle)
        self._drop([bundle.slot], bundle.pages)

    def _check_live(self, bundle: Bundle) -> None:
        dead = [page for page in bundle.pages if self._page_refs[page] < 1]
        if dead or (bundle.slot != ZERO_SLOT and self._slot_refs[bundle.slot] < 1):
            raise ReleasedError(f"the bundle of {bundle.length} tokens was released: slot {bundle.slot}, pages {dead}")

    def _drop(self, slots: Iterable[int], pages: Iterable[int]) -> None:
        free_slots, free_pages = [], []
        for slot in slots:
            self._slot_refs[slot] -= 1
            if slot != ZERO_SLOT and self._slot_refs[slot] == 0:
                free_slots.append(slot)
        for page in pages:
            self._page_refs[page] -= 1
            if self._page_refs[page] == 0:
                self._filled[page] = 0
                free_pages.append(page)
        self._free_slots += free_slots
        self._free_pages += free_pages
        if self._poison is not None and (free_slots or free_pages):
            self.put(self._poison(self.take(), free_slots, free_pages))

    # Steps

    def need(self, bundle: Bundle, tokens: int) -> Need:
        """What `reserve` would take from the free lists."""
        first_free = self._covered(bundle)
        last = -(-(bundle.length + tokens) // self.page_size)
        pages = max(0, last - first_free)
        return Need(int(not self._writes_in_place(bundle)), pages if self.layout.paged else 0)

    def _covered(self, bundle: Bundle) -> int:
        """How many of the bundle's pages the next token can use: all, or all but a last one that must be copied."""
        return len(bundle.pages) - (0 if self._appends_in_place(bundle) else 1)

    def _writes_in_place(self, bundle: Bundle) -> bool:
        return bundle.slot != ZERO_SLOT and self._slot_refs[bundle.slot] == 1

    def _appends_in_place(self, bundle: Bundle) -> bool:
        """A partly filled page belongs to whoever appends first; a second one copies it."""
        used = bundle.length % self.page_size
        if not used or not bundle.pages:
            return True
        last = bundle.pages[-1]
        return bool(self._page_refs[last] == 1 or self._filled[last] == used)

    def reserve(self, bundle: Bundle, tokens: int) -> Reservation:
        """Room for up to `tokens` more tokens. Raises CapacityError, changing nothing, if there is not enough."""
        self._check_live(bundle)
        need = self.need(bundle, tokens)
        if need.slots > len(self._free_slots) or need.pages > len(self._free_pages):
            raise CapacityError(
                f"{tokens} more tokens after {bundle.length} need {need.slots} slots and {need.pages} pages of "
                f"{self.page_size}, free are {len(self._free_slots)} slots and {len(self._free_pages)} pages"
            )
        write_slot = self._new_slot() if need.slots else bundle.slot
        kept = bundle.pages[: self._covered(bundle)] if self.layout.paged else ()
        fresh = tuple(self._new_page() for _ in range(need.pages))
        copied = None
        if self.layout.paged and len(kept) < len(bundle.pages):
            copied = (bundle.pages[-1], fresh[0])
        pages = kept + fresh
        self._claim(pages, bundle.length, bundle.length + tokens)
        return Reservation(bundle, tokens, write_slot, pages, copied)

    def _claim(self, pages: tuple[int, ...], start: int, stop: int) -> None:
        """Marks rows start..stop of a sequence as written, so that no other bundle appends to them in place."""
        for number in range(start // self.page_size, len(pages)):
            self._filled[pages[number]] = min(self.page_size, stop - number * self.page_size)

    def _new_slot(self) -> int:
        slot = self._free_slots.pop()
        self._slot_refs[slot] = 1
        return slot

    def _new_page(self) -> int:
        page = self._free_pages.pop()
        self._page_refs[page] = 1
        return page

    def commit(self, step: Reservation, tokens: int) -> Bundle:
        """The bundle after `tokens` of the reserved tokens were processed; it takes the place of the base's holder."""
        if not 0 <= tokens <= step.tokens:
            raise CapacityError(f"{tokens} tokens were processed where {step.tokens} were reserved")
        if tokens == 0:
            self.abandon(step)
            return step.base
        length = step.base.length + tokens
        used = -(-length // self.page_size) if self.layout.paged else 0
        self._claim(step.pages[:used], step.base.length, length)
        kept = set(step.pages[:used])
        leaving = [page for page in step.base.pages if page not in kept]
        surplus = [page for page in step.pages[used:] if page not in step.base.pages]
        self._drop([step.base.slot] if step.moved else [], leaving + surplus)
        self.counters.state_moves += step.moved
        if step.copied_page is not None:
            self.counters.kv_bytes_copied += self.page_bytes
        return Bundle(length, step.write_slot, step.pages[:used])

    def abandon(self, step: Reservation) -> None:
        """Gives back what was reserved; the base is as it was."""
        fresh = [page for page in step.pages if page not in step.base.pages]
        used = step.base.length % self.page_size
        if used and step.copied_page is None and step.pages:
            self._filled[step.base.pages[-1]] = used
        self._drop([step.write_slot] if step.moved else [], fresh)

    # Accounts

    @property
    def page_bytes(self) -> int:
        return self.layout.bytes_per_token * self.page_size

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def live_slots(self) -> int:
        return self._slot_refs.size - RESERVED_SLOTS - self.free_slots

    @property
    def live_pages(self) -> int:
        return self._page_refs.size - 1 - self.free_pages

    def live_bytes(self) -> Mapping[str, int]:
        """Bytes in use, by kind of state."""
        return bytes_by_kind(self.layout, self.live_slots, self.live_pages, self.page_size)

    def frees_slot(self, bundle: Bundle) -> bool:
        """Whether releasing the bundle once would free its slot."""
        return bundle.slot != ZERO_SLOT and self._slot_refs[bundle.slot] == 1

    def frees_page(self, bundle: Bundle) -> bool:
        """Whether releasing the bundle once would free a page."""
        return bool((self._page_refs[list(bundle.pages)] == 1).any())
