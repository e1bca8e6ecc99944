"""Short convolution, SiLU and the gated delta rule: a layer of Gated DeltaNet or Kimi Delta Attention between its
projections."""

import functools
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import gated_delta as delta
from pallas_kernels import short_conv as conv
from pallas_kernels.conv_gated_delta import separate, tpu
from pallas_kernels.partition import Axes, split
from pallas_kernels.registry import Implementation, Operator, choose
from pallas_kernels.slots import checkpoint_options

_separate = functools.partial(separate.conv_gated_delta, conv.short_conv, delta.gated_delta)

OPERATOR = Operator(
    "conv_gated_delta",
    (
        Implementation("pallas", tpu.conv_gated_delta, platforms=("tpu",), accepts=tpu.accepts),
        Implementation("pallas", _separate, platforms=("tpu", "gpu")),
        Implementation("xla", functools.partial(separate.conv_gated_delta, conv.xla.short_conv, delta.xla.gated_delta)),
        Implementation(
            "reference",
            functools.partial(separate.conv_gated_delta, conv.reference.short_conv, delta.reference.gated_delta),
            automatic=False,
        ),
    ),
)


def conv_gated_delta(
    inputs: Float[Array, "B T C"] | Float[Array, "B T 3 W"],
    filters: Float[Array, "C K"] | Float[Array, "3 W K"],
    conv_states: tuple[Float[Array, "L N K-1 _"], ...],
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
) -> tuple[Float[Array, "B T Hv dv"], tuple[Float[Array, "L N K-1 _"], ...], Float[Array, "L N Hv dk dv"]]:
    """q, k, v = silu(conv(inputs)), as of `short_conv` without bias, and then `gated_delta`.

    Args:
        inputs: projections of T new tokens, either [B, T, C], ordered by key head, [q | k | v of its value heads]
            (Gated DeltaNet), or q, k and v of as many heads each [B, T, 3, W] (Kimi Delta Attention).
        filters: K taps a channel, ordered as `inputs`.
        conv_states: for [B, T, C] one, [L, N, K-1, C]; else those of q, k and v.
        log_decay, beta, state: as of `gated_delta`; the widths of heads are those of the state.
        layer, read_slots, write_slots, lengths: as of both.
        checkpoint_lengths, checkpoint_slots: as of both. Either both or neither: else ValueError.

    Returns:
        The outputs in the inputs' dtype (unspecified on padding), the updated states of the convolutions, in a tuple,
        and of the delta rule. Activations are rounded to that dtype, as `short_conv` returns them.
    """
    options = checkpoint_options(checkpoint_lengths, checkpoint_slots)
    rest = (log_decay, beta, state, layer, read_slots, write_slots, lengths)
    if inputs.shape[1] == 1:
        # Nothing to fuse: each has a kernel for one token.
        return _separate(inputs, filters, conv_states, *rest, **options)
    # By key head, so that a mesh cuts between heads.
    heads, stacked = separate.key_heads(inputs, state), inputs.ndim == 4
    shape = (*inputs.shape[: 2 + stacked], heads, -1)
    by_head = inputs.reshape(shape), filters.reshape(*shape[2:], filters.shape[-1])
    names = "_ heads" if stacked else "heads"
    conv_axes = ("_ _ _ heads",) * len(conv_states)
    axes = Axes(
        (f"_ _ {names}", names, *("_ _ heads",) * 3, "", "", "", "", *conv_axes), ("_ _ heads", *conv_axes, "_ _ heads")
    )
    out, *states = split(_flattened, axes)(*by_head, *rest, *conv_states, **options)
    return out, tuple(states[:-1]), states[-1]


def _flattened(inputs: Array, filters: Array, *rest: Any, **options: Any) -> tuple[Array, ...]:
    """Channels in one dimension, on one device; results one after the other."""
    rest, conv_states = rest[:7], rest[7:]
    inputs = inputs.reshape(*inputs.shape[:-2], -1)
    filters = filters.reshape(*filters.shape[:-3], -1, filters.shape[-1])
    arguments = (inputs, filters, conv_states, *rest)
    out, conv_states, state = choose(OPERATOR, *arguments, **options)(*arguments, **options)
    return out, *conv_states, state
