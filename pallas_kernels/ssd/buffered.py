"""Decode steps of Mamba-2 that write a state only once for many tokens, and a small record for each."""

from jaxtyping import Array, Float, Int

from pallas_kernels.partition import Axes
from pallas_kernels.registry import Implementation, Operator, choose
from pallas_kernels.ssd import gpu_records, reference_records, tpu_buffered, xla_records
from pallas_kernels.ssd.records import SsdRecords

OPERATOR = Operator(
    "ssd_buffered",
    (
        Implementation("pallas", tpu_buffered.buffered, platforms=("tpu",), accepts=tpu_buffered.accepts),
        Implementation("pallas", gpu_records.buffered, platforms=("gpu",), accepts=gpu_records.accepts),
        Implementation("xla", xla_records.buffered),
        Implementation("reference", reference_records.buffered, automatic=False),
    ),
    Axes(
        arguments=(
            *("_ _ heads", "_ _ heads", "heads", "_ _ heads", "_ _ heads", "heads", "_ _ heads"),
            *("_ _ _ heads",) * 3,
        ),
        results=("_ _ heads",) * 2 + ("_ _ _ heads",) * 3,
    ),
)


def buffered(
    x: Float[Array, "B 1 H P"],
    dt: Float[Array, "B 1 H"],
    A: Float[Array, " H"],
    B: Float[Array, "B 1 G N"],
    C: Float[Array, "B 1 G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    ring: SsdRecords,
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    cursors: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B 1 H P"], Float[Array, "L S H P N"], SsdRecords]:
    """Run one token of each row from a checkpoint state and the records since.

    With h the checkpoint, and i the records in the ring and the new token t itself, decays as in `replay`,

        y = d(t) h C + sum_i d(i, t) (C . B_i) (dt x)_i + D x

    The token's record joins the ring. If that fills it, all records are folded into h, and the ring is empty again:
    `pallas_kernels.ring.next_cursors` says so for the next step. To go back by n tokens, n at most the cursor, is to
    take n off it.

    A row that stays in its slot writes its ring, and its state only if it folds. A row whose write slot is not its read
    slot (the first step of a fork) leaves the latter as it is, and copies to the former: the folded state, or h and the
    ring.

    Args:
        x, dt, A, B, C, D: as of `ssd`, of one token.
        state: checkpoints h.
        ring: records of W tokens for each slot and layer, [L, S, W, ...] (see `records.make_ring`). Those from a row's
            cursor on may hold anything.
        layer: which of the L layers to use, of state and ring.
        read_slots: where each row's h and ring are read; rows may share one.
        write_slots: where they go; distinct, save that padding rows share slot 0. No row may write a slot that another
            one reads (again save slot 0): rows are in flight at the same time.
        cursors: records in each row's ring, 0 to W - 1.
        lengths: 1, or 0 for a row of padding, which changes nothing but copies to another write slot.

    Returns:
        The outputs in float32 (unspecified on padding), the updated state, and the updated ring, unspecified from the
        next cursors on.
    """
    arguments = (
        x, dt, A, B, C, D, state, *ring.leaves(), layer, read_slots, write_slots, cursors, lengths,
    )  # fmt: skip
    out, state, *leaves = choose(OPERATOR, *arguments)(*arguments)
    return out, state, SsdRecords(*leaves)
