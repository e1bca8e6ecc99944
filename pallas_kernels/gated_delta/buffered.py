"""Decode steps of the gated delta rule that write a state only once for many tokens, and a small record for each."""

from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import gpu_records, reference_records, tpu_buffered, xla_records
from pallas_kernels.gated_delta.records import DeltaRecords
from pallas_kernels.partition import Axes
from pallas_kernels.registry import Implementation, Operator, choose

OPERATOR = Operator(
    "gated_delta_buffered",
    (
        Implementation("pallas", tpu_buffered.buffered, platforms=("tpu",), accepts=tpu_buffered.accepts),
        Implementation("pallas", gpu_records.buffered, platforms=("gpu",), accepts=gpu_records.accepts),
        Implementation("xla", xla_records.buffered),
        Implementation("reference", reference_records.buffered, automatic=False),
    ),
    Axes(
        arguments=("_ _ heads",) * 6 + ("_ _ _ heads",) * 3,
        results=("_ _ heads",) * 2 + ("_ _ _ heads",) * 3,
    ),
)


def buffered(
    q: Float[Array, "B 1 Hk dk"],
    k: Float[Array, "B 1 Hk dk"],
    v: Float[Array, "B 1 Hv dv"],
    log_decay: Float[Array, "B 1 Hv"] | Float[Array, "B 1 Hv dk"],
    beta: Float[Array, "B 1 Hv"],
    state: Float[Array, "L N Hv dk dv"],
    ring: DeltaRecords,
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    cursors: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B 1 Hv dv"], Float[Array, "L N Hv dk dv"], DeltaRecords]:
    """Run one token of each row from a checkpoint state and the records since.

    With S the checkpoint, i the records in the ring and t the new token, decays as in `replay`,

        u_t = beta_t (v_t - d(t) S^T k_t - sum_i (k_t . d(i, t) k_i) u_i)
        out = d(t) S^T q_t + sum_i (q_t . d(i, t) k_i) u_i + (q_t . k_t) u_t

    The token's record joins the ring. If that fills it, all records are folded into S, and the ring is empty again:
    `pallas_kernels.ring.next_cursors` says so for the next step. To go back by n tokens, n at most the cursor, is to
    take n off it.

    A row that stays in its slot writes its record alone, and its state only if it folds. A row whose write slot is not
    its read slot (the first step of a fork) leaves the latter as it is, and copies to the former: the folded state, or
    S and the ring.

    Args:
        q, k, v, log_decay, beta: as of `gated_delta`, of one token.
        state: checkpoints S.
        ring: records of W tokens for each slot and layer, [L, N, W, ...] (see `records.make_ring`). Those from a row's
            cursor on may hold anything.
        layer: which of the L layers to use, of state and ring.
        read_slots: where each row's S and ring are read; rows may share one.
        write_slots: where they go; distinct, save that padding rows share slot 0. No row may write a slot that another
            one reads (again save slot 0): rows are in flight at the same time.
        cursors: records in each row's ring, 0 to W - 1.
        lengths: 1, or 0 for a row of padding, which changes nothing but copies to another write slot.

    Returns:
        The outputs in float32 (unspecified on padding), the updated state, and the updated ring, unspecified from the
        next cursors on.
    """
    arguments = (
        q, k, v, log_decay, beta, state, *ring.leaves(), layer, read_slots, write_slots, cursors, lengths,
    )  # fmt: skip
    out, state, *leaves = choose(OPERATOR, *arguments)(*arguments)
    return out, state, DeltaRecords(*leaves)
