"""Published models' shapes for Mamba-2's other forms: prefill with checkpoints, verify, replay, buffered decode."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.published_case import LAYERS, PREFILL_TOKENS, Case, array, total_bytes
from pallas_kernels.published_state_space import SSD_MODELS, SsdModel
from pallas_kernels.ssd import ssd, tpu_buffered
from pallas_kernels.ssd.buffered import buffered
from pallas_kernels.ssd.records import SsdRecords
from pallas_kernels.ssd.replay import replay
from pallas_kernels.ssd.tpu_decode import heads_per_block
from pallas_kernels.ssd.tpu_grid import Grid
from pallas_kernels.ssd.verify import verify
from pallas_kernels.tpu_sums import CHUNK

# Rings of few layers would fit into VMEM, where the compiler then moves them whole.
RING_SIZE, RING_LAYERS = 16, 20


def _state(model: SsdModel, batch: int, layers: int = LAYERS) -> jax.ShapeDtypeStruct:
    return array(layers, batch + 2, model.heads, model.head_dim, model.state_size)


def _state_bytes(model: SsdModel) -> int:
    """Of one row."""
    return model.heads * model.head_dim * model.state_size * 4


def _records(model: SsdModel, *tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (
        array(*tokens, model.groups, model.state_size), array(*tokens, model.heads * model.head_dim),
        array(*tokens, model.heads),
    )  # fmt: skip


def _inputs(model: SsdModel, batch: int, tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """x, dt, A, B, C and D as layers have them: the heads or groups of a token side by side."""
    shared = array(batch, tokens, model.groups * model.state_size, dtype=jnp.bfloat16)
    return (
        array(batch, tokens, model.heads * model.head_dim, dtype=jnp.bfloat16), array(batch, tokens, model.heads),
        array(model.heads), shared, shared, array(model.heads),
    )  # fmt: skip


def _by_head(model: SsdModel, x, dt, A, B, C, D) -> tuple[Any, Any, Any, Any, Any, Any]:
    batch, tokens = dt.shape[:2]
    B, C = (v.reshape(batch, tokens, model.groups, model.state_size) for v in (B, C))
    return x.reshape(batch, tokens, model.heads, model.head_dim), dt, A, B, C, D


def _steps(model: SsdModel, batch: int) -> int:
    return batch * model.heads // heads_per_block(model.heads, model.groups, model.head_dim, model.state_size)


def ssd_verify_case(name: str, batch: int, tokens: int) -> Case:
    """One verification of `tokens` draft tokens a row. The state is no result: it is neither donated nor returned."""
    model = SSD_MODELS[name]
    inputs, rows = _inputs(model, batch, tokens), array(batch, dtype=jnp.int32)
    results = (array(batch, tokens, model.heads * model.head_dim), *_records(model, batch, tokens))

    def function(*arguments):
        *inputs, state, layer, read_slots, lengths = arguments
        x, dt, A, B, C, D = _by_head(model, *inputs)
        out, records = verify(x, dt, A, B, C, D, state, layer, read_slots, lengths)
        return tuple(x.reshape(*x.shape[:2], -1) for x in (out, *records.leaves()))

    return Case(
        "ssd", name, "verify", function, (*inputs, _state(model, batch), array(dtype=jnp.int32), rows, rows), (),
        batch * tokens, _steps(model, batch), 0, batch * _state_bytes(model) + total_bytes(*inputs, *results),
        batch * tokens * model.heads * model.head_dim * model.state_size,
    )  # fmt: skip


def ssd_replay_case(name: str, batch: int, tokens: int) -> Case:
    """One replay of up to `tokens` records a row."""
    model = SSD_MODELS[name]
    records, rows = _records(model, batch, tokens), array(batch, dtype=jnp.int32)

    def function(B, dt_x, log_decay, state, layer, read_slots, write_slots, accepted):
        B = B.reshape(*B.shape[:2], model.groups, model.state_size)
        return replay(SsdRecords(B, dt_x, log_decay), accepted, state, layer, read_slots, write_slots)

    flat_B = array(batch, tokens, model.groups * model.state_size)
    return Case(
        "ssd", name, "replay", function,
        (flat_B, *records[1:], _state(model, batch), array(dtype=jnp.int32), rows, rows, rows), 3, batch * tokens,
        _steps(model, batch), 0, 2 * batch * _state_bytes(model) + total_bytes(*records),
        batch * tokens * model.heads * model.head_dim * model.state_size,
    )  # fmt: skip


def ssd_buffered_case(name: str, batch: int, ring_size: int = RING_SIZE) -> Case:
    """One step of buffered decode. The fewest bytes are those of an average step: a ring half full, and one state in
    `ring_size` written."""
    model = SSD_MODELS[name]
    inputs, rows = _inputs(model, batch, 1), array(batch, dtype=jnp.int32)
    ring, record = _records(model, RING_LAYERS, batch + 2, ring_size), total_bytes(*_records(model, batch))

    def function(*arguments):
        *inputs, state, B, dt_x, log_decay, layer, read_slots, write_slots, cursors, lengths = arguments
        call = (*_by_head(model, *inputs), state, SsdRecords(B, dt_x, log_decay), layer)
        out, state, ring = buffered(*call, read_slots, write_slots, cursors, lengths)
        return out.reshape(*out.shape[:2], -1), state, *ring.leaves()

    states, shape = batch * _state_bytes(model), (model.heads, model.groups, model.head_dim, model.state_size)
    steps = batch * model.heads // heads_per_block(*shape, tpu_buffered.BLOCK_BYTES)
    return Case(
        "ssd", name, "buffered", function,
        (*inputs, _state(model, batch, RING_LAYERS), *ring, array(dtype=jnp.int32), rows, rows, rows, rows),
        (6, 7, 8, 9), batch, steps, steps // ring_size,
        states + states // ring_size + (ring_size + 1) * record // 2 + total_bytes(*inputs)
        + batch * model.heads * model.head_dim * 4, 0, rare=True,
    )  # fmt: skip


def ssd_checkpoints_case(name: str, batch: int, tokens: int = PREFILL_TOKENS, checkpoints: int = 4) -> Case:
    """A prefill that keeps the states of so many boundaries besides its end."""
    model = SSD_MODELS[name]
    inputs, rows = _inputs(model, batch, tokens), array(batch, dtype=jnp.int32)
    numbers = array(batch, checkpoints, dtype=jnp.int32)

    def function(*arguments):
        *inputs, state, layer, reads, writes, lengths, kept_lengths, kept_slots = arguments
        options = {"checkpoint_lengths": kept_lengths, "checkpoint_slots": kept_slots}
        out, state = ssd(*_by_head(model, *inputs), state, layer, reads, writes, lengths, **options)
        return out.reshape(*out.shape[:2], -1), state

    steps = math.prod(
        Grid(batch, tokens, model.heads, model.groups, model.head_dim, model.state_size, jnp.bfloat16).steps
    )
    return Case(
        "ssd", name, "prefill", function,
        (*inputs, _state(model, batch), array(dtype=jnp.int32), rows, rows, rows, numbers, numbers), len(inputs),
        batch * tokens, steps, 0,
        (2 + checkpoints) * batch * _state_bytes(model) + total_bytes(*inputs)
        + batch * tokens * model.heads * model.head_dim * 4,
        batch * tokens * model.heads * model.head_dim * (CHUNK // 2 + 2 * model.state_size),
    )  # fmt: skip


def ssd_record_cases() -> list[Case]:
    """What the TPU kernels are counted on."""
    name = "Nemotron 3 Nano 30B"
    return [ssd_verify_case(name, 64, 8), ssd_replay_case(name, 64, 8), ssd_buffered_case(name, 64)]
