"""Draft tokens through Mamba-2: their outputs, and what they would add to a state that stays as it is."""

from jaxtyping import Array, Float, Int

from pallas_kernels.partition import Axes
from pallas_kernels.registry import Implementation, Operator, choose
from pallas_kernels.ssd import gpu_records, reference_records, tpu_verify, xla_records
from pallas_kernels.ssd.records import SsdRecords

OPERATOR = Operator(
    "ssd_verify",
    (
        Implementation("pallas", tpu_verify.verify, platforms=("tpu",), accepts=tpu_verify.accepts),
        Implementation("pallas", gpu_records.verify, platforms=("gpu",), accepts=gpu_records.accepts),
        Implementation("xla", xla_records.verify),
        Implementation("reference", reference_records.verify, automatic=False),
    ),
    Axes(
        arguments=("_ _ heads", "_ _ heads", "heads", "_ _ heads", "_ _ heads", "heads", "_ _ heads"),
        results=("_ _ heads",) * 4,
    ),
)


def verify(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G N"],
    C: Float[Array, "B T G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T H P"], SsdRecords]:
    """Run T draft tokens from each row's state in one pass, without writing the state.

    The outputs are those of `ssd`. Once it is known how many of a row's tokens are accepted, `replay` brings the state
    there from the records. (A short convolution before needs no such form: its inputs are its records.)

    Args:
        x, dt, A, B, C, D, state, layer: as of `ssd`.
        read_slots: where each row's state is read; rows may share one.
        lengths: valid tokens of each row, 0 to T.

    Returns:
        The outputs in float32 (unspecified on padding), and the T tokens' records [B, T, ...], null on padding.
    """
    arguments = (x, dt, A, B, C, D, state, layer, read_slots, lengths)
    out, *records = choose(OPERATOR, *arguments)(*arguments)
    return out, SsdRecords(*records)
