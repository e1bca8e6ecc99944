"""How bench_device.py checks and times: against the references, and in loops within one program."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import device_cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import registry
from pallas_kernels.published_gpu_case import GpuCase
from pallas_kernels.ring import next_cursors

# Root mean square of the error over that of the reference; of the indexer, the share of keys chosen otherwise. Inputs
# are bfloat16, whose rounding makes half of this in long sums.
TOLERANCE = 2**-6
REPEATS = 5


@dataclass(frozen=True)
class Bounds:
    """What the device does in this run: bytes a second of a copy, read and written, and multiply-adds of a product."""

    bytes_per_second: float
    multiply_adds_per_second: float

    def seconds(self, case: GpuCase) -> tuple[float, float]:
        """The least for a case: to move its bytes, and to do its matrix products."""
        return case.fewest_bytes / self.bytes_per_second, case.multiply_adds / self.multiply_adds_per_second


def implementation(case: GpuCase, kind: str, interpret: bool) -> Callable[..., Any]:
    """The case's operator in one of its forms: `pallas`, `xla` or `reference`."""
    if kind == "pallas" and interpret:
        return case.interpreted

    def call(*arguments: Array) -> Any:
        with registry.force(kind):
            return case.function(*arguments)

    return call


def parity_error(case: GpuCase, interpret: bool) -> float:
    """The kernel's error, over outputs and states, rows of several lengths, a fork, and NaN behind each row's end."""
    inputs = device_cases.make_inputs(case, ragged=True)
    got, right = (jax.jit(implementation(case, kind, interpret))(*inputs.values()) for kind in ("pallas", "reference"))
    got, right = ([np.asarray(x.astype(jnp.float32)) for x in results] for results in (got, right))
    valid = _valid(case, inputs)
    pairs = [
        [x.reshape(*case.rows, -1)[valid] for x in pair]
        for pair in zip(got[: case.outputs], right[: case.outputs], strict=True)
    ]
    if case.operator == "index_top_k":
        shares = [len(np.setdiff1d(b, a)) / np.sum(b >= 0) for a, b in zip(*pairs[0], strict=True)]
        return float(np.mean(shares))
    for name, *states in zip(case.donated, got[case.outputs :], right[case.outputs :], strict=True):
        pairs.append([_records_in(x, inputs) if name.startswith("ring") else x for x in states])
    return max(_relative(*pair) for pair in pairs)


def _valid(case: GpuCase, inputs: dict[str, Array]) -> np.ndarray:
    """Which tokens [B, T] there are."""
    if "valid" in inputs:
        return np.asarray(inputs["valid"]).reshape(case.rows)
    lengths = inputs.get("lengths", inputs.get("accepted"))
    lengths = (inputs["seen"] > 0).sum(axis=1) if lengths is None else lengths
    return np.arange(case.rows[1]) < np.asarray(lengths)[:, None]


def _records_in(ring: np.ndarray, inputs: dict[str, Array]) -> np.ndarray:
    """The ring [L, N, W, ...] without what is behind a row's last record, which may be anything."""
    ring, layer = ring.copy(), int(inputs["layer"])
    counts = next_cursors(inputs["cursors"], inputs["lengths"], ring.shape[2])
    for slot, count in zip(np.asarray(inputs["write_slots"]), np.asarray(counts), strict=True):
        ring[layer, slot, count:] = 0
    return ring


def _relative(got: np.ndarray, right: np.ndarray) -> float:
    """Pages where no token is hold the same NaN in both, if nothing else was written."""
    if not np.array_equal(np.isnan(got), np.isnan(right)):
        return float("inf")
    difference = np.square(np.nan_to_num(got - right)).mean()
    return float(np.sqrt(difference / np.square(np.nan_to_num(right)).mean()))


def seconds_per_call(case: GpuCase, kind: str, interpret: bool, least_seconds: float) -> float:
    """The median time of a call on the device, warm: calls follow one another in a loop within one program."""
    function = implementation(case, kind, interpret)
    donated = list(case.donate)
    inputs = list(device_cases.make_inputs(case).values())
    states = tuple(inputs[number] for number in donated)
    others = tuple(x for number, x in enumerate(inputs) if number not in donated)
    shapes = jax.eval_shape(function, *inputs)[: case.outputs]
    outs = tuple(jnp.zeros(x.shape, x.dtype) for x in shapes)

    def program(count: Array, others: tuple[Array, ...], carry: Any) -> Any:
        def body(_: Array, carry: Any) -> Any:
            # Nothing of a call can be done once for all of them: its inputs wait for the call before.
            outs, states = carry
            inputs, states, _ = jax.lax.optimization_barrier((others, states, () if states else outs))
            rest, old = iter(inputs), iter(states)
            arguments = [next(old if number in donated else rest) for number in range(len(case.arguments))]
            results = function(*arguments)
            return tuple(results[: case.outputs]), tuple(results[case.outputs :])

        return jax.lax.fori_loop(0, count, body, carry)

    run = jax.jit(program, donate_argnums=2)
    return _median_of_loops(functools.partial(_step, run, others), (outs, states), least_seconds)


def _step(run: Callable[..., Any], others: Any, count: int, carry: Any) -> Any:
    return jax.block_until_ready(run(jnp.int32(count), others, carry))


def _median_of_loops(step: Callable[[int, Any], Any], carry: Any, least_seconds: float) -> float:
    """Of `step(count, carry)`, which makes `count` calls: as many as take `least_seconds`, `REPEATS` times."""
    carry = step(1, carry)  # compiles
    started = time.perf_counter()
    carry = step(2, carry)
    once = (time.perf_counter() - started) / 2
    count = max(1, min(2000, round(least_seconds / max(once, 1e-6))))
    took = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        carry = step(count, carry)
        took.append((time.perf_counter() - started) / count)
    return statistics.median(took)


def measure_bounds(elements: int, width: int, least_seconds: float) -> Bounds:
    """A pass over so many float32 numbers, and a bfloat16 product of random matrices of this width."""

    def loop(body: Callable[[Array], Array]) -> Callable[..., Any]:
        run = jax.jit(lambda count, _, x: jax.lax.fori_loop(0, count, lambda _, x: body(x), x), donate_argnums=2)
        return functools.partial(_step, run, None)

    numbers = jax.random.normal(jax.random.key(0), (elements,), jnp.float32)
    copy = _median_of_loops(loop(lambda x: x + 1), numbers, least_seconds)
    left, right = jax.random.normal(jax.random.key(1), (2, width, width), jnp.bfloat16)
    scale = jnp.bfloat16(width**-0.5)
    product = _median_of_loops(loop(lambda x: (x @ right) * scale), left, least_seconds)
    return Bounds(8 * elements / copy, width**3 / product)
