"""The state space duality recurrence of Mamba-2, with its state in slots."""

from jaxtyping import Array, Float, Int

from pallas_kernels.partition import Axes
from pallas_kernels.registry import Implementation, Operator, choose
from pallas_kernels.slots import checkpoint_options
from pallas_kernels.ssd import gpu, reference, tpu, xla

OPERATOR = Operator(
    "ssd",
    (
        Implementation("pallas", gpu.ssd, platforms=("gpu",), accepts=gpu.accepts),
        Implementation("pallas", tpu.ssd, ("tpu",), tpu.accepts),
        Implementation("xla", xla.ssd),
        Implementation("reference", reference.ssd, automatic=False),
    ),
    Axes(
        arguments=("_ _ heads", "_ _ heads", "heads", "_ _ heads", "_ _ heads", "heads", "_ _ heads"),
        results=("_ _ heads", "_ _ heads"),
    ),
)


def ssd(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G N"],
    C: Float[Array, "B T G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
) -> tuple[Float[Array, "B T H P"], Float[Array, "L S H P N"]]:
    """Run T tokens of Mamba-2 (arXiv:2405.21060, section 5) from each row's state.

    Per head, whose group is h // (H // G):

        h <- exp(dt A) h + (dt x) B^T;  y = h C + D x

    States and sums are float32. Of bfloat16 inputs, the products of a prefill on a TPU or
    GPU have factors rounded to bfloat16.

    Args:
        x: inputs of T new tokens. Tokens at and beyond a row's length are padding and may hold anything, NaN included.
        dt: step sizes, at least 0: after bias, softplus and limits.
        A: decay rates, at most 0.
        B, C: what is written and what is read, of each group of heads.
        D: share of the input that goes past the state.
        state: h of S slots in L layers.
        layer: which of the L layers to use.
        read_slots: where each row's state is read; rows may share one.
        write_slots: where each row's new state goes; distinct, save that padding rows share slot 0.
        lengths: valid tokens of each row, 0 to T. A row of length 0 copies its state unchanged.
        checkpoint_lengths: after how many of its tokens a row's state is kept besides, up to its length; 0 is none.
        checkpoint_slots: where it goes; 0 for none. Like write slots, and other than those. Either both or neither:
            else ValueError.

    Returns:
        The outputs in float32 (unspecified on padding), and the updated state.
    """
    arguments = (x, dt, A, B, C, D, state, layer, read_slots, write_slots, lengths)
    options = checkpoint_options(checkpoint_lengths, checkpoint_slots)
    return choose(OPERATOR, *arguments, **options)(*arguments, **options)
