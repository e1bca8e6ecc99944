"""What a GPU case is: a call of an operator at a published model's shapes, and what it comes to."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta import gated_delta, gpu_records
from pallas_kernels.gated_delta import gpu as gated_delta_gpu
from pallas_kernels.gated_delta.buffered import buffered
from pallas_kernels.gated_delta.records import DeltaRecords
from pallas_kernels.gated_delta.replay import replay
from pallas_kernels.gated_delta.verify import verify
from pallas_kernels.grouped_matmul import ExpertBiases, routed_experts
from pallas_kernels.grouped_matmul import gpu as experts_gpu
from pallas_kernels.latent_attention import gpu as latent_gpu
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.paged_attention import gpu as paged_gpu
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.published_case import LAYERS, array
from pallas_kernels.selective_scan import gpu as selective_scan_gpu
from pallas_kernels.selective_scan import selective_scan
from pallas_kernels.short_conv import gpu as short_conv_gpu
from pallas_kernels.short_conv import short_conv
from pallas_kernels.sparse_attention import gpu as sparse_gpu
from pallas_kernels.sparse_attention import index_top_k, sparse_latent_attention
from pallas_kernels.ssd import gpu as ssd_gpu
from pallas_kernels.ssd import gpu_records as ssd_gpu_records
from pallas_kernels.ssd import ssd
from pallas_kernels.ssd.buffered import buffered as ssd_buffered
from pallas_kernels.ssd.records import SsdRecords
from pallas_kernels.ssd.replay import replay as ssd_replay
from pallas_kernels.ssd.verify import verify as ssd_verify

# Slots that no row uses, and pages that no sequence does.
SPARE = 2

Arguments = dict[str, jax.ShapeDtypeStruct]
Function = Callable[..., Any]


def _leaves(function: Function) -> Function:
    """With results one after the other, records taken apart."""
    return lambda *arguments, **options: tuple(jax.tree.leaves(function(*arguments, **options)))


def _replay(function: Function, records: Any) -> Function:
    """Of records taken apart."""
    return _leaves(lambda a, b, c, *rest: function(records(a, b, c), *rest))


def _buffered(function: Function, records: Any, ring: int) -> Function:
    """With the ring taken apart, whose first leaf is argument number `ring`."""
    return _leaves(lambda *x: function(*x[:ring], records(*x[ring : ring + 3]), *x[ring + 3 :]))


def _experts(function: Function) -> Function:
    """With matrices and biases, as many as there are, one after the other."""

    def run(x: Any, ids: Any, weights: Any, *rest: Any, gated: bool, **options: Any) -> Any:
        gate, (up, down, valid, layer, *biases) = rest[0] if gated else None, rest[gated:]
        options |= {"layer": layer, "biases": ExpertBiases(*biases) if biases else None}
        return (function(x, ids, weights, gate, up, down, valid, **options),)

    return run


# Public function, and the GPU kernels alone, which take `interpret` as well. Both give outputs, then states.
OPERATORS: dict[str, tuple[Function, Function]] = {
    "gated_delta": (gated_delta, gated_delta_gpu.gated_delta),
    "gated_delta_verify": (_leaves(verify), gpu_records.verify),
    "gated_delta_replay": (_replay(replay, DeltaRecords), _leaves(gpu_records.replay)),
    "gated_delta_buffered": (_buffered(buffered, DeltaRecords, 6), gpu_records.buffered),
    "ssd": (ssd, ssd_gpu.ssd),
    "ssd_verify": (_leaves(ssd_verify), ssd_gpu_records.verify),
    "ssd_replay": (_replay(ssd_replay, SsdRecords), _leaves(ssd_gpu_records.replay)),
    "ssd_buffered": (_buffered(ssd_buffered, SsdRecords, 7), ssd_gpu_records.buffered),
    "selective_scan": (selective_scan, selective_scan_gpu.selective_scan),
    "short_conv": (short_conv, short_conv_gpu.short_conv),
    "paged_attention": (paged_attention, paged_gpu.paged_attention),
    "latent_attention": (latent_attention, latent_gpu.latent_attention),
    "sparse_latent_attention": (sparse_latent_attention, sparse_gpu.sparse_latent_attention),
    "index_top_k": (index_top_k, sparse_gpu.index_top_k),
    "routed_experts": (_experts(routed_experts), _experts(experts_gpu.routed_experts)),
}


@dataclass(frozen=True)
class GpuCase:
    """A call of an operator for so many sequences and tokens of each (`rows`).

    `arguments` by name, in order, and `options` by name. `donated` are the states, which come back last, after so many
    `outputs`. `fewest_bytes` are what any kernel must read and write, `multiply_adds` those of the matrix products that
    the computation needs.
    """

    operator: str
    model: str
    rows: tuple[int, int]
    options: dict[str, Any]
    arguments: Arguments
    donated: tuple[str, ...]
    fewest_bytes: int
    multiply_adds: int
    outputs: int = 1

    @property
    def function(self) -> Function:
        """The operator with its options."""
        return functools.partial(OPERATORS[self.operator][0], **self.options)

    @property
    def interpreted(self) -> Function:
        """The GPU kernel with its options, interpreted."""
        return functools.partial(OPERATORS[self.operator][1], interpret=True, **self.options)

    @property
    def form(self) -> str:
        """`decode` or `prefill`."""
        return "decode" if self.rows[1] == 1 else "prefill"

    @property
    def donate(self) -> tuple[int, ...]:
        """The numbers of the donated arguments."""
        return tuple(list(self.arguments).index(name) for name in self.donated)


def rows_of_slots(batch: int, *names: str) -> Arguments:
    """The layer, and integers of each row."""
    rows = {name: array(batch, dtype=jnp.int32) for name in names}
    return {"layer": array(dtype=jnp.int32), **rows}


def state_of(slot: jax.ShapeDtypeStruct, batch: int, layers: int = LAYERS) -> jax.ShapeDtypeStruct:
    """An array of such slots for a batch, and some more."""
    return array(layers, batch + SPARE, *slot.shape, dtype=slot.dtype)
