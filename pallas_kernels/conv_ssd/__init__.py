"""Short convolutions, SiLU and Mamba-2's recurrence: a layer of Mamba-2 between its projections."""

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import short_conv as conv
from pallas_kernels import ssd as recurrence
from pallas_kernels.conv_ssd import separate, tpu
from pallas_kernels.partition import current
from pallas_kernels.registry import Implementation, Operator, choose
from pallas_kernels.slots import checkpoint_options

_Form = Callable[..., Any]


def _by(convolve: _Form, recur: _Form) -> _Form:
    """Of forms for one device, to which channels go by no name."""
    return functools.partial(separate.conv_ssd, lambda axis, *arguments, **rest: convolve(*arguments, **rest), recur)


def _convolve(axis: str, *arguments: Any, **options: Any) -> tuple[Array, Array]:
    return conv.short_conv(*arguments, axis=axis, **options)


_separate: Callable[..., Any] = functools.partial(separate.conv_ssd, _convolve, recurrence.ssd)

OPERATOR = Operator(
    "conv_ssd",
    (
        Implementation("pallas", tpu.conv_ssd, platforms=("tpu",), accepts=tpu.accepts),
        Implementation("pallas", _separate, platforms=("tpu", "gpu")),
        Implementation("xla", _by(conv.xla.short_conv, recurrence.xla.ssd)),
        Implementation("reference", _by(conv.reference.short_conv, recurrence.reference.ssd), automatic=False),
    ),
)


def conv_ssd(
    inputs: tuple[Float[Array, "B T H*P"], Float[Array, "B T 2*G*N"]],
    filters: tuple[Float[Array, "_ K"], ...],
    biases: tuple[Float[Array, " _"], ...] | None,
    conv_states: tuple[Float[Array, "L S K-1 _"], ...],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
) -> tuple[Float[Array, "B T H P"], tuple[Float[Array, "L S K-1 _"], ...], Float[Array, "L S H P N"]]:
    """x, [B | C] = silu(conv(inputs)), as of `short_conv`, and then `ssd`.

    Args:
        inputs: projections of T new tokens, to x and to B and C side by side, each ordered by group.
        filters, biases, conv_states: for both: K taps a channel, an offset a channel or none, the last inputs.
        dt, A, D, state: as of `ssd`; the widths of heads are those of the state.
        layer, read_slots, write_slots, lengths: as of both operators.
        checkpoint_lengths, checkpoint_slots: as of both. Either both or neither: else ValueError.

    Returns:
        The outputs in x's dtype (unspecified on padding), the updated states of the convolutions, and of the
        recurrence. Activations are rounded to that dtype, as `short_conv` returns them.
    """
    arguments = (inputs, filters, biases, conv_states, dt, A, D, state, layer, read_slots, write_slots, lengths)
    options = checkpoint_options(checkpoint_lengths, checkpoint_slots)
    # One token has nothing to fuse: each operator has a kernel for it. On a mesh each device has the heads of some
    # groups only, but the convolution's state of all groups, so that those two operators are split differently.
    if inputs[0].shape[1] == 1 or current() is not None:
        return _separate(*arguments, **options)
    return choose(OPERATOR, *arguments, **options)(*arguments, **options)
