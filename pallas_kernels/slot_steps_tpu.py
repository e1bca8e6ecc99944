"""Steps of a TPU kernel that take states from their slots to VMEM and back: several rows a step where states are small.

States stay in HBM, and slots are anywhere in it, so that a step of several rows has a copy for each. Four buffers of a
step's states go round: two are on their way in, one is worked on where it lies, one is on its way out. What the states
are to meet is made ready a step before, beside the work on the states there.

No row may write a slot that another row reads: rows are in flight at the same time. Rows that fill up the last step
read and write the null slot, whose states they leave as they are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped

# States of one step: the control of a step, and the latency of its first results, are shared by all of them. Of few
# states, smaller steps, so that states come and go while others are worked on.
STEP_BYTES = 1 << 21
_LEAST_STEPS, _LEAST_BYTES = 8, 1 << 20
_BUFFERS = 4


@dataclass(frozen=True)
class Steps:
    """Each has `size` heads of `rows` rows, all heads if several rows; they are shared out among `cores`."""

    batch: int
    heads: int
    size: int
    rows: int
    cores: int

    @property
    def blocks(self) -> int:
        """Steps that a row falls into."""
        return self.heads // self.size

    @property
    def padding(self) -> int:
        """Rows that fill up the last steps."""
        return -self.batch % (self.rows * self.cores // math.gcd(self.blocks, self.cores))

    @property
    def total(self) -> int:
        """Steps of all cores."""
        return (self.batch + self.padding) // self.rows * self.blocks

    @property
    def each(self) -> int:
        """Steps of a core."""
        return self.total // self.cores

    @property
    def grid(self) -> tuple[int, int]:
        """A core's first step only makes ready what the next one needs."""
        return self.cores, self.each + 1

    def slots(self, slots: Int[Array, " B"]) -> Int[Array, " rows"]:
        """Of rows and padding."""
        return jnp.pad(slots.astype(jnp.int32), (0, self.padding))

    def split(self, x: Shaped[Array, "B n *_"]) -> Shaped[Array, "steps m *_"]:
        """What rows have for each head, or each group of heads, as steps have it."""
        x = jnp.pad(x, [(0, self.padding)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(self.total, -1, *x.shape[2:])

    def join(self, x: Shaped[Array, "steps m *_"]) -> Shaped[Array, "B n *_"]:
        """The inverse of `split`."""
        return x.reshape(self.batch + self.padding, -1, *x.shape[2:])[: self.batch]

    def ahead(self, *block: int, **options: Any) -> pl.BlockSpec:
        """A step's block of what is made ready a step before."""
        return pl.BlockSpec((None, *block), lambda core, step, *_: self._place(core, step, block), **options)

    def now(self, *block: int, **options: Any) -> pl.BlockSpec:
        """A step's block of what is used, or made, with the states."""
        return pl.BlockSpec((None, *block), lambda core, step, *_: self._place(core, step - 1, block), **options)

    def _place(self, core, step, block):
        return core * self.each + jnp.clip(step, 0, self.each - 1), *(0,) * len(block)

    def scratch(self, *state: int, dtype: Any) -> list[Any]:
        """Of `run`, for heads with states of this shape."""
        semaphores = pltpu.SemaphoreType.DMA((_BUFFERS,))
        return [pltpu.VMEM((_BUFFERS, self.rows * self.size, *state), dtype), semaphores, semaphores]

    def run(
        self,
        read: Callable[[Any, Any], Any],
        write: Callable[[Any, Any], Any],
        scratch: Sequence[Any],
        prepare: Callable[[Any], None],
        work: Callable[[Any, Any], None],
    ) -> None:
        """A step of the grid.

        `read(row, heads)` and `write(row, heads)` are where the states of a row's heads, a slice, are in HBM.
        `prepare(buffer)`, of two, is for the step after; `work(buffer, states)` changes the step's [heads, ...].
        """
        states, arriving, leaving = scratch
        step = pl.program_id(1) - 1

        def copies(step, outwards: bool):
            number, buffer = pl.program_id(0) * self.each + step, jax.lax.rem(step, _BUFFERS)
            first, block = jax.lax.div(number, self.blocks) * self.rows, jax.lax.rem(number, self.blocks)
            heads = pl.ds(block * self.size, self.size)
            for place in range(self.rows):
                here = states.at[buffer, pl.ds(place * self.size, self.size)]
                if outwards:
                    yield pltpu.make_async_copy(here, write(first + place, heads), leaving.at[buffer])
                else:
                    yield pltpu.make_async_copy(read(first + place, heads), here, arriving.at[buffer])

        def start(step, outwards: bool):
            for copy in copies(step, outwards):
                copy.start()

        def wait(step, semaphores):
            buffer = jax.lax.rem(step, _BUFFERS)
            pltpu.make_async_copy(states.at[buffer], states.at[buffer], semaphores.at[buffer]).wait()

        @pl.when(step < 0)
        def _():
            for number in range(min(2, self.each)):
                start(number, False)
            prepare(0)

        @pl.when(step >= 0)
        def _():
            @pl.when(step + 2 < self.each)
            def _():
                pl.when(step >= 2)(lambda: wait(step + 2, leaving))
                start(step + 2, False)

            wait(step, arriving)
            work(jax.lax.rem(step, 2), states.at[jax.lax.rem(step, _BUFFERS)])
            prepare(jax.lax.rem(step + 1, 2))
            start(step, True)

            @pl.when(step == self.each - 1)
            def _():
                for number in range(min(_BUFFERS, self.each)):
                    wait(number, leaving)


def plan(batch: int, heads: int, sizes: Sequence[int], state_bytes: int, cores: int = 1) -> Steps:
    """Steps of one of these `sizes`, numbers of heads with states of so many bytes that divide `heads`: as large as
    `STEP_BYTES` allow, rows shared out evenly."""
    wanted = min(STEP_BYTES, max(_LEAST_BYTES, batch * heads * state_bytes // _LEAST_STEPS))
    size = max((n for n in sizes if n * state_bytes <= wanted), default=min(sizes))
    most = max(1, wanted // (size * state_bytes)) if size == heads else 1
    rows = -(-batch // -(-batch // most))
    return Steps(batch, heads, size, rows, min(cores, -(-batch // rows) * heads // size))


def cores_of(interpret: Any) -> int:
    """Cores that share a kernel's grid on the TPU that it is traced for."""
    if interpret or not pltpu.is_tpu_device():
        return 2
    return pltpu.get_tpu_info().num_cores
