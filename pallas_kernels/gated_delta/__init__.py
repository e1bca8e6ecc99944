"""The gated delta rule of Gated DeltaNet and Kimi Delta Attention, with its state in slots."""

from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import gpu, reference, tpu, xla
from pallas_kernels.partition import Axes
from pallas_kernels.registry import Implementation, Operator, choose
from pallas_kernels.slots import checkpoint_options

OPERATOR = Operator(
    "gated_delta",
    (
        Implementation("pallas", tpu.gated_delta, platforms=("tpu",), accepts=tpu.accepts),
        Implementation("pallas", gpu.gated_delta, platforms=("gpu",), accepts=gpu.accepts),
        Implementation("xla", xla.gated_delta),
        Implementation("reference", reference.gated_delta, automatic=False),
    ),
    Axes(
        arguments=("_ _ heads", "_ _ heads", "_ _ heads", "_ _ heads", "_ _ heads", "_ _ heads"),
        results=("_ _ heads", "_ _ heads"),
    ),
)


def gated_delta(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "L N Hv dk dv"]]:
    """Run T tokens of the gated delta rule from each row's state.

    Per value head, with q and k divided by sqrt(sum of squares + 1e-6) and q then multiplied by dk^-0.5:

        S <- exp(log_decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  out = S^T q

    A decay per head is Gated DeltaNet (arXiv:2412.06464); one per key channel, scaling the rows of S, is Kimi Delta
    Attention (arXiv:2510.26692). States and sums are float32. Of bfloat16 inputs, the products of a prefill on
    a TPU or GPU have factors rounded to bfloat16.

    Args:
        q, k: queries and keys of T new tokens, not normalised. Value head h uses key head h // (Hv // Hk).
        v: values. Tokens at and beyond a row's length are padding and may hold anything, NaN included.
        log_decay: natural logarithm of the decay, at most 0.
        beta: strength of the update, from 0 to 1 (2 if negative eigenvalues are allowed).
        state: S of N slots in L layers.
        layer: which of the L layers to use.
        read_slots: where each row's state is read; rows may share one.
        write_slots: where each row's new state goes; distinct, save that padding rows share slot 0. No row may write a
            slot that another one reads (again save slot 0): rows are in flight at the same time.
        lengths: valid tokens of each row, 0 to T. A row of length 0 copies its state unchanged.
        checkpoint_lengths: after how many of its tokens a row's state is kept besides, up to its length; 0 is none.
        checkpoint_slots: where it goes; 0 for none. Like write slots, and other than those. Either both or neither:
            else ValueError.

    Returns:
        The outputs in float32 (unspecified on padding), and the updated state.
    """
    arguments = (q, k, v, log_decay, beta, state, layer, read_slots, write_slots, lengths)
    options = checkpoint_options(checkpoint_lengths, checkpoint_slots)
    return choose(OPERATOR, *arguments, **options)(*arguments, **options)
