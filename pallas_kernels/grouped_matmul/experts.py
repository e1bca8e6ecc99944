"""What experts may have beside their matrices: an activation, and biases."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

# (gate product [*, I], None for experts without a gate; up product [*, I]) -> inner [*, I], elementwise
Activation = Callable[[Any, Array], Array]


class ExpertBiases(NamedTuple):
    """Of every expert's three products; `gate` is None for experts without one."""

    gate: Float[Array, "E I"] | None
    up: Float[Array, "E I"]
    down: Float[Array, "E D"]


def untileable(up: Any) -> str | None:
    """Why kernels that take tiles of stacked matrices cannot take these, or None."""
    if isinstance(up, tuple):
        return "expert weights come as tuples, not stacked"
    for name, width in (("hidden size", up.shape[-1]), ("inner width", up.shape[-2])):
        if width % 8:
            return f"{name} {width} is not a multiple of 8"
    return None


def of_layer(layer: int | Int[Array, ""] | None, *matrices: Any) -> tuple[Any, ...]:
    """The matrices themselves, or this layer's of stacks over layers."""
    return matrices if layer is None else tuple(None if each is None else each[layer] for each in matrices)
