"""The selective scan of Mamba-1, with its state in slots."""

from jaxtyping import Array, Float, Int

from pallas_kernels.partition import Axes
from pallas_kernels.registry import Implementation, Operator, choose
from pallas_kernels.selective_scan import gpu, reference, tpu, xla

OPERATOR = Operator(
    "selective_scan",
    (
        Implementation("pallas", gpu.selective_scan, platforms=("gpu",), accepts=gpu.accepts),
        Implementation("pallas", tpu.selective_scan, ("tpu",), tpu.accepts),
        Implementation("xla", xla.selective_scan),
        Implementation("reference", reference.selective_scan, automatic=False),
    ),
    Axes(
        arguments=("_ _ heads", "_ _ heads", "_ heads", "", "", "heads", "_ _ _ heads"),
        results=("_ _ heads", "_ _ _ heads"),
    ),
)


def selective_scan(
    x: Float[Array, "B T E"],
    dt: Float[Array, "B T E"],
    A: Float[Array, "N E"],
    B: Float[Array, "B T N"],
    C: Float[Array, "B T N"],
    D: Float[Array, " E"],
    state: Float[Array, "L S N E"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T E"], Float[Array, "L S N E"]]:
    """Run T tokens of Mamba-1 (arXiv:2312.00752, section 3) from each row's state.

    Per channel, with a state of N numbers that each decay at their own rate:

        h <- exp(dt A) h + (dt x) B;  y = h . C + D x

    Channels lie along the last axis, of the state too: N is small, and would leave most of a vector register empty.
    States and sums are float32. Of bfloat16 inputs, a prefill on a TPU rounds what C
    reads of the states to bfloat16.

    Args:
        x: inputs of T new tokens. Tokens at and beyond a row's length are padding and may hold anything, NaN included.
        dt: step sizes, at least 0: after bias and softplus.
        A: decay rates, at most 0.
        B, C: what is written and what is read, the same for all channels.
        D: share of the input that goes past the state.
        state: h of S slots in L layers.
        layer: which of the L layers to use.
        read_slots: where each row's state is read; rows may share one.
        write_slots: where each row's new state goes; distinct, save that padding rows share slot 0.
        lengths: valid tokens of each row, 0 to T. A row of length 0 copies its state unchanged.

    Returns:
        The outputs in float32 (unspecified on padding), and the updated state.
    """
    arguments = (x, dt, A, B, C, D, state, layer, read_slots, write_slots, lengths)
    return choose(OPERATOR, *arguments)(*arguments)
