"""Causal depthwise convolution over a few tokens, with its state in slots."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.partition import Axes, split
from pallas_kernels.registry import Implementation, Operator, choose
from pallas_kernels.short_conv import gpu, reference, tpu, xla
from pallas_kernels.slots import checkpoint_options

OPERATOR = Operator(
    "short_conv",
    (
        Implementation("pallas", tpu.short_conv, platforms=("tpu",), accepts=tpu.accepts),
        Implementation("pallas", gpu.short_conv, platforms=("gpu",)),
        Implementation("xla", xla.short_conv),
        Implementation("reference", reference.short_conv, automatic=False),
    ),
)


def short_conv(
    x: Float[Array, "B T *C"],
    weight: Float[Array, "*C K"],
    state: Float[Array, "L N K-1 *C"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    bias: Float[Array, "*C"] | None = None,
    *,
    axis: str = "heads",
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
) -> tuple[Float[Array, "B T *C"], Float[Array, "L N K-1 *C"]]:
    """Convolve each channel over time, then apply SiLU.

    y_t = silu(bias + sum_j weight[:, j] x_{t-K+1+j}): tap K-1 multiplies the current token, and inputs from before
    this call come from the state. This is the short convolution of Gated DeltaNet (arXiv:2412.06464), Kimi Delta
    Attention (arXiv:2510.26692) and Mamba.

    Args:
        x: inputs of T new tokens. Tokens at and beyond a row's length are padding and may hold anything, NaN included.
        weight: one filter of K taps a channel. Channels may have several dimensions.
        state: the last K-1 inputs, oldest first, of N slots in L layers.
        layer: which of the L layers to use.
        read_slots: where each row's state is read; rows may share one.
        write_slots: where each row's new state goes; distinct, save that padding rows share slot 0. No row may write a
            slot that another one reads (again save slot 0): rows are in flight at the same time.
        lengths: valid tokens of each row, 0 to T. A row of length 0 copies its state unchanged.
        bias: added before SiLU.
        checkpoint_lengths: after how many of its tokens a row's state is kept besides, up to its length; 0 is none.
        checkpoint_slots: where it goes; 0 for none. Like write slots, and other than those. Either both or neither:
            else ValueError.
        axis: what the channels' last dimension goes by, on a mesh; `_` for channels that every device has.

    Returns:
        The activations in x's dtype (computed in float32; unspecified on padding), and the updated state.
    """
    names = "_ " * (x.ndim - 3) + axis
    axes = Axes((f"_ _ {names}", names, f"_ _ _ {names}", "", "", "", "", names), (f"_ _ {names}", f"_ _ _ {names}"))
    options = checkpoint_options(checkpoint_lengths, checkpoint_slots)
    return split(_flattened, axes)(x, weight, state, layer, read_slots, write_slots, lengths, bias, **options)


def _flattened(x: Array, weight: Array, state: Array, *rest: Any, **options: Any) -> tuple[Array, Array]:
    """All channels in one dimension: the same memory."""
    *slots, bias = rest
    flat = (
        x.reshape(*x.shape[:2], -1), weight.reshape(-1, weight.shape[-1]), state.reshape(*state.shape[:3], -1),
        *slots, None if bias is None else bias.reshape(-1),
    )  # fmt: skip
    out, new_state = choose(OPERATOR, *flat, **options)(*flat, **options)
    return out.reshape(x.shape), new_state.reshape(state.shape)
