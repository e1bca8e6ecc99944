"""States of Mamba-2 brought forward by update records, without the tokens that the records came from."""

from jaxtyping import Array, Float, Int

from pallas_kernels.partition import Axes
from pallas_kernels.registry import Implementation, Operator, choose
from pallas_kernels.ssd import gpu_records, reference_records, tpu_replay, xla_records
from pallas_kernels.ssd.records import SsdRecords

OPERATOR = Operator(
    "ssd_replay",
    (
        Implementation("pallas", tpu_replay.replay, platforms=("tpu",), accepts=tpu_replay.accepts),
        Implementation("pallas", gpu_records.replay, platforms=("gpu",), accepts=gpu_records.accepts_records),
        Implementation("xla", xla_records.replay),
        Implementation("reference", reference_records.replay, automatic=False),
    ),
    Axes(arguments=("_ _ heads", "_ _ heads", "_ _ heads", "", "_ _ heads"), results=("_ _ heads",)),
)


def replay(
    records: SsdRecords,
    accepted: Int[Array, " B"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
) -> Float[Array, "L S H P N"]:
    """Fold the first accepted[b] records of each row into the row's state.

    With d(i, n) the product of the decays of records i+1..n, and d(n) of the first n,

        h <- d(n) h + sum_{i<n} d(i, n) (dt x)_i B_i^T

    That is the state after those tokens, were they run one by one, but for rounding.

    Args:
        records: of T tokens of each row, [B, T, ...]: from `verify`, or a ring's [layer, slots] with the ring's cursors
            as `accepted`. May hold anything from accepted[b] on.
        accepted: how many of its records a row takes, 0 to T; with none it copies its state unchanged.
        state, layer, read_slots, write_slots: as of `ssd`.

    Returns:
        The updated state.
    """
    arguments = (*records.leaves(), accepted, state, layer, read_slots, write_slots)
    new_state: Float[Array, "L S H P N"] = choose(OPERATOR, *arguments)(*arguments)
    return new_state
