"""Turns reservations into the arrays a compiled program takes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from jaxhybrid.state.batch import BatchAddress
from jaxhybrid.state.pool import NULL_PAGE, NULL_SLOT, Reservation

DISPATCH_TOKENS = 32  # what starting a program costs, in tokens of prefill


def address_of(
    steps: Sequence[Reservation],
    lengths: Sequence[int],
    rows: int,
    width: int,
    offsets: Sequence[int] | None = None,
) -> BatchAddress:
    """The address of a batch, padded to `rows` with null slots and pages; `width` pages a row.

    `offsets`: of positions from token indices, for a model that takes images.
    """
    table = np.full((rows, width), NULL_PAGE, np.int32)
    columns = np.zeros((4, rows), np.int32)
    columns[2:] = NULL_SLOT
    for row, (step, length) in enumerate(zip(steps, lengths, strict=True)):
        table[row, : len(step.pages)] = step.pages
        columns[:, row] = step.base.length, length, step.base.slot, step.write_slot
    starts, lengths_array, read_slots, write_slots = columns
    address = BatchAddress(*map(jnp.asarray, (starts, lengths_array, table, read_slots, write_slots)))
    if offsets is None:
        return address
    return replace(address, offsets=jnp.asarray([*offsets, *[0] * (rows - len(offsets))], jnp.int32))


def page_copies(steps: Sequence[Reservation]) -> tuple[Int32[np.ndarray, " N"], Int32[np.ndarray, " N"]] | None:
    """Source and target pages to copy before the step, padded with the null page; None if there are none."""
    copies = [step.copied_page for step in steps if step.copied_page is not None]
    if not copies:
        return None
    padded = np.full((2, 1 << (len(copies) - 1).bit_length()), NULL_PAGE, np.int32)
    padded[:, : len(copies)] = np.array(copies, np.int32).T
    return padded[0], padded[1]


@cache
def chunk_plan(tokens: int, buckets: tuple[int, ...]) -> tuple[int, ...]:
    """Chunk sizes that prefill `tokens` at the least cost, where a chunk costs its padded size and a fixed share.

    What fills the largest chunk four times over is not planned to its end: the plan is that chunk alone.
    """
    largest = buckets[-1]
    if tokens > largest:
        return (largest, *chunk_plan(tokens - largest, buckets)) if tokens < 4 * largest else (largest,)
    plans: list[tuple[int, ...]] = []
    for bucket in buckets:
        if bucket >= tokens:
            plans.append((bucket,))
            break
        plans.append((bucket, *chunk_plan(tokens - bucket, buckets)))
    return min(plans, key=lambda plan: sum(plan) + DISPATCH_TOKENS * len(plan))
