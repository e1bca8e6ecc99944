"""Blocks of pages on a TPU, copied from HBM to VMEM while the block before is worked on.

Pages stay in HBM. A grid step goes through the blocks of one span of a sequence: each page is one copy to VMEM, started
a block ahead, and at the end of a step the next step's first block, so that no step waits for its first. What lies
after a span's last token is not fetched.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

LANES = 128
# The page table of a kernel's rows lies in SMEM.
TABLE_BYTES = 1 << 19


def refusal(pages: tuple[Array, ...], page_table: Array, max_length: int | None) -> str | None:
    """Why pages of these shapes cannot be copied, or None."""
    tile = 32 // pages[0].dtype.itemsize
    for array in pages:
        if array.shape[2] % tile:
            return f"pages of {array.shape[2]} tokens are not a multiple of {tile}"
    if page_table.shape[1] * 4 > TABLE_BYTES:
        return f"{page_table.shape[1]} pages of a row are more than {TABLE_BYTES >> 10} KiB of page table"
    if max_length is not None:
        return "max_length asks for a form that can be differentiated"
    return None


def block_pages(
    page: int, row_bytes: int, table_width: int, block_bytes: int, most_tokens: int, multiple: int = LANES
) -> int:
    """Pages of a block: multiples of so many keys, about `block_bytes`, no more than a table or `most_tokens` need."""
    unit = math.lcm(page, multiple) // page
    needed = pl.cdiv(min(table_width, pl.cdiv(most_tokens, page)), unit)
    fitting = block_bytes // (unit * page * row_bytes)
    return unit * max(1, min(needed, fitting))


class Span(NamedTuple):
    """What a grid step goes through: a row of the page table, a part of the pages' lanes, the positions from `begin`, a
    page's first, up to `end`, and how many blocks of them; at least one, of no key at all. `number`: its own."""

    row: Any
    part: Any
    begin: Any
    end: Any
    count: Any
    number: Any


@dataclass(frozen=True)
class Blocks:
    """Tokens of a page, pages of a block, and entries of a row of the page table.

    `pieces`, a power of two: the pages are parts of larger ones, of so many parts each. The page table numbers the
    parts of a sequence, and a second table, with rows of `whole_width`, has the larger pages' ids.
    """

    page: int
    pages: int
    table_width: int
    pieces: int = 1
    whole_width: int = 0

    @property
    def keys(self) -> int:
        """Tokens of a block."""
        return self.page * self.pages

    def span(self, row: Any, part: Any, begin: Any, end: Any, number: Any) -> Span:
        """Of those positions; all are traced scalars."""
        count = jax.lax.div(end - begin + self.keys - 1, jnp.int32(self.keys))
        return Span(row, part, begin, end, jnp.maximum(count, 1), number)


class Fetch:
    """Copies of a block's pages from HBM to one of the two buffers [2, keys, width] of each array.

    `beside`: an array [spans, blocks * n, 128] of which each block takes n rows, and its buffers [2, n, 128].
    """

    def __init__(self, blocks: Blocks, layer, tables, arrays, buffers, semaphores, beside=None) -> None:
        self._blocks, self._layer, self._tables = blocks, layer, tables
        self._arrays, self._buffers, self._semaphores = arrays, buffers, semaphores
        self._beside = beside

    def through(self, span: Span, following: Span, final, slot, work: Callable[[Any, Any], None]):
        """`work(index, slot)` for each block, once it is in the buffers at `slot`. The first block was started in the
        slot given; the `following` span's first is, unless this is the `final` step. Returns its slot."""

        def block(index, slot):
            last = index + 1 == span.count

            @pl.when(jnp.logical_not(last & final))
            def _():
                ahead = Span(*(jnp.where(last, there, here) for there, here in zip(following, span, strict=True)))
                self.start(ahead, jnp.where(last, 0, index + 1), 1 - slot)

            self._wait(span, index, slot)
            work(index, slot)
            return 1 - slot

        return jax.lax.fori_loop(0, span.count, block, slot)

    def start(self, span: Span, index, slot) -> None:
        """Start the copies of a span's block."""
        first, count = self._pages(span, index)
        whole = self._blocks.pages

        def start_page(place):
            for copy in self._copies(span, self._page_id(span, first + place), place, slot):
                copy.start()

        def start_block():
            for place in range(whole):
                start_page(place)

        if self._beside is not None:
            pl.when(count > 0)(lambda: self._copy_beside(span, index, slot).start())
        pl.when(count == whole)(start_block)
        pl.when(count != whole)(lambda: pl.loop(0, count)(start_page))

    def _wait(self, span: Span, index, slot) -> None:
        _, count = self._pages(span, index)
        whole = self._blocks.pages

        def wait_page(place):
            for copy in self._copies(span, 0, place, slot):
                copy.wait()

        def wait_block():
            for number, buffer in enumerate(self._buffers):
                pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], self._semaphores.at[number, slot]).wait()

        if self._beside is not None:
            pl.when(count > 0)(lambda: self._copy_beside(span, index, slot).wait())
        pl.when(count == whole)(wait_block)
        pl.when(count != whole)(lambda: pl.loop(0, count)(wait_page))

    def _page_id(self, span: Span, place):
        blocks = self._blocks
        entry = self._tables[0][span.row * blocks.table_width + place]
        if len(self._tables) == 1:
            return entry
        shift = blocks.pieces.bit_length() - 1
        whole = self._tables[1][span.row * blocks.whole_width + (entry >> shift)]
        return (whole << shift) + (entry & (blocks.pieces - 1))

    def _copy_beside(self, span: Span, index, slot):
        array, buffer = self._beside
        rows = buffer.shape[1]
        source = array.at[span.number, pl.ds(pl.multiple_of(index * rows, rows), rows)]
        return pltpu.make_async_copy(source, buffer.at[slot], self._semaphores.at[len(self._arrays), slot])

    def _pages(self, span: Span, index):
        """First page of a block in the row's table, and how many of its pages hold tokens."""
        page = jnp.int32(self._blocks.page)
        first = jax.lax.div(span.begin, page) + index * self._blocks.pages
        last = jax.lax.div(span.end + page - 1, page)
        return first, jnp.clip(last - first, 0, self._blocks.pages)

    def _copies(self, span: Span, page_id, place, slot):
        page = self._blocks.page
        for number, (array, buffer) in enumerate(zip(self._arrays, self._buffers, strict=True)):
            width = buffer.shape[-1]
            source = array.at[self._layer, page_id]
            if array.shape[-1] != width:
                source = source.at[:, pl.ds(pl.multiple_of(span.part * width, LANES), width)]
            target = buffer.at[slot, pl.ds(pl.multiple_of(place * page, page), page)]
            yield pltpu.make_async_copy(source, target, self._semaphores.at[number, slot])
