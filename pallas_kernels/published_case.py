"""What a published case is: a call of an operator at a published model's shapes, and what it comes to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

LAYERS = 2
DECODE_BATCHES = (1, 64, 256)
PREFILL_TOKENS = 2048


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An argument of a case."""
    return jax.ShapeDtypeStruct(shape, dtype)


def total_bytes(*arrays: jax.ShapeDtypeStruct) -> int:
    """Of all the arrays."""
    return sum(x.size * x.dtype.itemsize for x in arrays)


@dataclass(frozen=True)
class Case:
    """A call of an operator.

    `donate` is the number of the state argument, or those of several, or of none. `steps` are the kernel's grid
    steps, `edges` how often its first and last steps of a row come up, `trips` those of a loop within the steps, as
    `tpu_schedule.Loop` takes them; if `rare`, `edges` are instead the steps with the kernel's conditional work. A
    kernel of several loops has instead `loops`, how often a step goes through each of `tpu_schedule.Schedule.loops`.
    `fewest_bytes` is what any kernel must read and write, `multiply_adds` those of the
    matrix products that the computation needs.
    """

    operator: str
    model: str
    form: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    donate: int | tuple[int, ...]
    tokens: int
    steps: int
    edges: int
    fewest_bytes: int
    multiply_adds: int
    trips: tuple[int, ...] = ()
    rare: bool = False
    loops: tuple[int, ...] = ()

    @property
    def donated(self) -> tuple[int, ...]:
        """Numbers of the arguments that are donated."""
        return (self.donate,) if isinstance(self.donate, int) else self.donate
