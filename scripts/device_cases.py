"""What bench_device.py runs: calls at reduced shapes for parity, published ones for time, and inputs for either."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import published_gpu as published
from pallas_kernels.published_gpu_case import GpuCase
from pallas_kernels.published_gpu_experts import EXPERTS, ExpertShape, routed_experts_case
from pallas_kernels.published_gpu_records import gated_delta_record_cases, record_cases, ssd_record_cases


def parity_cases() -> list[GpuCase]:
    """One token and a prefill of every operator and kind of model, few heads of published widths."""
    cases: list[GpuCase] = []
    for tokens, context in ((1, 300), (70, 370)):
        batch = 3
        cases += [
            *(
                published.gated_delta_case(name, published.DeltaShape(2, 4, 128, per_channel), batch, tokens)
                for name, per_channel in (("KDA", True), ("Gated DeltaNet", False))
            ),
            published.ssd_case("Mamba-2", published.SsdShape(4, 64, 2, 128), batch, tokens),
            published.selective_scan_case("Mamba-1", 200, 16, batch, tokens),
            published.short_conv_case("4 taps", 200, batch, tokens),
            *(
                published.paged_attention_case(name, shape, batch, tokens, context)
                for name, shape in (
                    ("heads of 256", published.AttentionShape(8, 1, 256)),
                    ("heads of 128", published.AttentionShape(6, 2, 128)),
                    ("window and sinks", published.AttentionShape(8, 2, 64, 128, sinks=True)),
                )
            ),
            published.latent_attention_case("MLA", published.LatentShape(32), batch, tokens, context),
            published.sparse_attention_case("DSA", published.LatentShape(32), batch, tokens, context, 128),
            published.index_case("DSA", 64, 128, batch, tokens, context, 128),
        ]
    return cases + _parity_of_records() + _parity_of_experts()


def _parity_of_records() -> list[GpuCase]:
    deltas = (("KDA", True), ("Gated DeltaNet", False))
    return [
        *(
            case
            for name, per_channel in deltas
            for case in gated_delta_record_cases(name, published.DeltaShape(2, 4, 128, per_channel), 3)
        ),
        *ssd_record_cases("Mamba-2", published.SsdShape(4, 64, 2, 128), 3),
    ]


def _parity_of_experts() -> list[GpuCase]:
    """Few experts and narrow, of every kind: one token, some, and as many as fill tiles."""
    rows = {"Kimi Linear 48B": [(1, 1), (3, 70)], "Nemotron 3 Nano": [(3, 5)], "gpt-oss 120B": [(3, 70)]}
    return [
        routed_experts_case(name, dataclasses.replace(EXPERTS[name], experts=16, width=320, inner=192), *each)
        for name, sizes in rows.items()
        for each in sizes
    ]


def timed_cases() -> list[GpuCase]:
    """Decode at batch 64 and forms on records, prefill of 2,048 tokens, decode at batch 1: of all operators the first
    model, then the others."""
    forms = [
        published.gpu_cases(64, 1, 8192, 65_536) + record_cases(64),
        published.gpu_cases(1, 2048, 8192, 16_384),
        published.gpu_cases(1, 1, 8192, 65_536),
    ]
    first: list[GpuCase] = []
    others: list[GpuCase] = []
    for form in forms:
        seen: set[str] = set()
        for case in form:
            (others if case.operator in seen else first).append(case)
            seen.add(case.operator)
    return first + others


def smoke_cases() -> list[GpuCase]:
    """Tiny ones, to run this program's every line without a GPU."""
    return [
        published.gated_delta_case("tiny", published.DeltaShape(1, 1, 32, True), 2, 1),
        published.paged_attention_case("tiny", published.AttentionShape(2, 1, 16), 2, 1, 100),
        published.index_case("tiny", 16, 16, 2, 3, 100, 24),
        *gated_delta_record_cases("tiny", published.DeltaShape(1, 1, 32, True), 2, ring=3)[1:],
        routed_experts_case("tiny", ExpertShape(3, 2, 24, 16), 2, 3),
    ]


def make_inputs(case: GpuCase, *, ragged: bool = False, seed: int = 0) -> dict[str, Array]:
    """Random arguments of a case, by name: pages and slots out of order.

    With `ragged` the rows after the first are shorter; what is behind their end is NaN. Otherwise all are of full
    length, and states are written where they were read.
    """
    rng, (batch, tokens) = np.random.default_rng(seed), case.rows
    lengths = np.array([tokens if not ragged else max(tokens // (row + 1) - row // 2, 0) for row in range(batch)])
    if ragged and "cursors" in case.arguments:
        lengths = np.arange(batch) < max(batch - 1, 1)
    numbers = _numbers(case, rng, lengths, ragged)
    per_token = (batch * tokens,) if "valid" in case.arguments else (batch, tokens)
    key = jax.random.key(seed)
    arguments: dict[str, Array] = {}
    for index, (name, struct) in enumerate(case.arguments.items()):
        if name in numbers:
            arguments[name] = jnp.asarray(numbers[name], struct.dtype)
            continue
        draw = _DRAWS.get(name, _normal)
        array = jax.jit(draw, static_argnums=(1, 2))(jax.random.fold_in(key, index), struct.shape, struct.dtype)
        if ragged and struct.shape[: len(per_token)] == per_token:
            behind = jnp.arange(tokens) >= jnp.asarray(lengths)[:, None]
            array = jnp.where(behind.reshape(*per_token, *[1] * (array.ndim - len(per_token))), jnp.nan, array)
        arguments[name] = array
    return arguments


def _normal(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def _projection(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return (jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)


def _rate(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Negative, and small enough that a state remembers some tokens."""
    return -0.1 * jnp.exp(jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _step(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.nn.softplus(jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _strength(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.nn.sigmoid(jax.random.normal(key, shape, jnp.float32)).astype(dtype)


_DRAWS: dict[str, Callable[[Array, tuple[int, ...], Any], Array]] = {
    "log_decay": _rate, "A": _rate, "dt": _step, "beta": _strength, "w_k": _projection, "w_v": _projection,
    "ring_log_decay": _rate, "gate": _projection, "up": _projection, "down": _projection,
}  # fmt: skip


def _numbers(case: GpuCase, rng: np.random.Generator, lengths: np.ndarray, ragged: bool) -> dict[str, Any]:
    """The integer arguments that the case has."""
    structs, (batch, tokens) = case.arguments, case.rows
    numbers: dict[str, Any] = {"layer": 1, "lengths": lengths, "accepted": lengths}
    if "valid" in structs:
        count, chosen = structs["up"].shape[1], structs["expert_ids"].shape[1]
        numbers["expert_ids"] = np.array([rng.permutation(count)[:chosen] for _ in range(batch * tokens)])
        numbers["valid"] = (np.arange(tokens) < lengths[:, None]).ravel()
        return numbers
    if "cursors" in structs:  # the first row's ring is full with this token; rows in between have any number of records
        size = structs["ring_log_decay"].shape[2]
        numbers["cursors"] = (size - 1 - np.arange(batch) * 5) % size
    if "state" in structs:
        *slots, spare = rng.permutation(np.arange(1, structs["state"].shape[1]))[: batch + 1]
        numbers |= {"read_slots": np.array(slots), "write_slots": np.array(slots)}
        if ragged:  # a fork: the first row and the last one start from one state, which stays
            numbers["read_slots"][0], numbers["write_slots"][-1] = slots[-1], spare
        return numbers
    pages = structs[case.donated[0]].shape[1]
    width = structs["page_table"].shape[1]
    numbers["page_table"] = rng.permutation(np.arange(1, pages))[: batch * width].reshape(batch, width)
    starts = np.full(batch, _context(case) - tokens)
    if ragged:
        starts -= rng.integers(0, starts.min() // 2, batch)
    steps = np.arange(tokens)
    numbers["starts"] = starts
    numbers["seen"] = np.where(steps < lengths[:, None], starts[:, None] + steps + 1, 0)
    if "chosen" in structs:
        count = structs["chosen"].shape[2]
        numbers["chosen"] = np.array([[_some(rng, seen, count) for seen in row] for row in numbers["seen"]])
    return numbers


def _some(rng: np.random.Generator, seen: int, count: int) -> np.ndarray:
    """`count` of so many positions, then -1."""
    some = rng.choice(seen, min(seen, count), replace=False)
    return np.pad(some, (0, count - len(some)), constant_values=-1)


def _context(case: GpuCase) -> int:
    """Tokens of a sequence with its new ones: its pages are full."""
    return case.arguments["page_table"].shape[1] * published.PAGE
