"""Draft tokens through the gated delta rule: their outputs, and what they would add to a state that stays as it is."""

from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import gpu_records, reference_records, tpu_verify, xla_records
from pallas_kernels.gated_delta.records import DeltaRecords
from pallas_kernels.partition import Axes
from pallas_kernels.registry import Implementation, Operator, choose

OPERATOR = Operator(
    "gated_delta_verify",
    (
        Implementation("pallas", tpu_verify.verify, platforms=("tpu",), accepts=tpu_verify.accepts),
        Implementation("pallas", gpu_records.verify, platforms=("gpu",), accepts=gpu_records.accepts),
        Implementation("xla", xla_records.verify),
        Implementation("reference", reference_records.verify, automatic=False),
    ),
    Axes(arguments=("_ _ heads",) * 6, results=("_ _ heads",) * 4),
)


def verify(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T Hv dv"], DeltaRecords]:
    """Run T draft tokens from each row's state in one pass, without writing the state.

    The outputs are those of `gated_delta`. Once it is known how many of a row's tokens are accepted, `replay` brings
    the state there from the records; no token goes through the layer a second time, and a rejected one leaves no trace.
    (A short convolution before the rule needs no such form: its inputs are its records.)

    Args:
        q, k, v, log_decay, beta, state, layer: as of `gated_delta`.
        read_slots: where each row's state is read; rows may share one.
        lengths: valid tokens of each row, 0 to T.

    Returns:
        The outputs in float32 (unspecified on padding), and the T tokens' records [B, T, ...], null on padding.
    """
    arguments = (q, k, v, log_decay, beta, state, layer, read_slots, lengths)
    out, *records = choose(OPERATOR, *arguments)(*arguments)
    return out, DeltaRecords(*records)
