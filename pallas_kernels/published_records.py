"""Published models' shapes for the recurrent operators' other forms: prefill with checkpoints, verify, replay, buffered
decode. Of the gated delta rule; for Mamba-2 see `published_ssd_records.py`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta import gated_delta, tpu_buffered, tpu_decode, tpu_grid
from pallas_kernels.gated_delta.buffered import buffered
from pallas_kernels.gated_delta.records import DeltaRecords
from pallas_kernels.gated_delta.replay import replay
from pallas_kernels.gated_delta.verify import verify
from pallas_kernels.published_case import LAYERS, PREFILL_TOKENS, Case, array, total_bytes
from pallas_kernels.published_models import DELTA_MODELS, DeltaModel
from pallas_kernels.tpu_sums import CHUNK

# Rings of few layers would fit into VMEM, where the compiler then moves them whole.
RING_SIZE, RING_LAYERS = 16, 20
DRAFT_TOKENS = (4, 8)


def _state(model: DeltaModel, batch: int, layers: int = LAYERS) -> jax.ShapeDtypeStruct:
    return array(layers, batch + 2, model.value_heads, model.dim, model.dim)


def _state_bytes(model: DeltaModel) -> int:
    """Of one row."""
    return model.value_heads * model.dim**2 * 4


def _records(model: DeltaModel, *tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    decay = (model.value_heads, model.dim) if model.per_channel else (model.value_heads,)
    return (
        array(*tokens, model.key_heads, model.dim), array(*tokens, model.value_heads, model.dim),
        array(*tokens, *decay),
    )  # fmt: skip


def _inputs(model: DeltaModel, batch: int, tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v, log_decay and beta as layers have them: the heads of a token side by side."""
    keys = array(batch, tokens, model.key_heads * model.dim, dtype=jnp.bfloat16)
    values = array(batch, tokens, model.value_heads * model.dim, dtype=jnp.bfloat16)
    decay = array(batch, tokens, model.value_heads * (model.dim if model.per_channel else 1))
    return keys, keys, values, decay, array(batch, tokens, model.value_heads)


def _by_head(state, q, k, v, log_decay, beta) -> tuple[Any, Any, Any, Any, Any]:
    dim = state.shape[-1]
    q, k, v = (x.reshape(*x.shape[:2], -1, dim) for x in (q, k, v))
    return q, k, v, log_decay if log_decay.shape == beta.shape else log_decay.reshape(v.shape), beta


def _steps(model: DeltaModel, batch: int) -> int:
    groups = model.value_heads // model.key_heads
    return batch * model.value_heads // tpu_decode.heads_per_block(model.value_heads, groups, model.dim**2 * 4)


def gated_delta_verify_case(name: str, batch: int, tokens: int) -> Case:
    """One verification of `tokens` draft tokens a row. The state is no result: it is neither donated nor returned."""
    model = DELTA_MODELS[name]
    inputs, rows = _inputs(model, batch, tokens), array(batch, dtype=jnp.int32)
    results = (array(batch, tokens, model.value_heads, model.dim), *_records(model, batch, tokens))

    def function(*arguments):
        *inputs, state, layer, read_slots, lengths = arguments
        q, k, v, log_decay, beta = _by_head(state, *inputs)
        out, records = verify(q, k, v, log_decay, beta, state, layer, read_slots, lengths)
        return tuple(x.reshape(*x.shape[:2], -1) for x in (out, *records.leaves()))

    return Case(
        "gated_delta", name, "verify", function,
        (*inputs, _state(model, batch), array(dtype=jnp.int32), rows, rows), (), batch * tokens,
        _steps(model, batch), 0, batch * _state_bytes(model) + total_bytes(*inputs, *results),
        batch * tokens * model.value_heads * model.dim * 2 * model.dim,
    )  # fmt: skip


def gated_delta_replay_case(name: str, batch: int, tokens: int) -> Case:
    """One replay of up to `tokens` records a row."""
    model = DELTA_MODELS[name]
    records, rows = _records(model, batch, tokens), array(batch, dtype=jnp.int32)

    flat = [array(batch, tokens, x.size // (batch * tokens)) for x in records]

    def function(*arguments):
        *flat, state, layer, read_slots, write_slots, accepted = arguments
        by_head = (x.reshape(like.shape) for x, like in zip(flat, records, strict=True))
        return replay(DeltaRecords(*by_head), accepted, state, layer, read_slots, write_slots)

    return Case(
        "gated_delta", name, "replay", function,
        (*flat, _state(model, batch), array(dtype=jnp.int32), rows, rows, rows), 3, batch * tokens,
        _steps(model, batch), 0, 2 * batch * _state_bytes(model) + total_bytes(*records),
        batch * tokens * model.value_heads * model.dim * model.dim,
    )  # fmt: skip


def gated_delta_checkpoints_case(name: str, batch: int, tokens: int = PREFILL_TOKENS, checkpoints: int = 4) -> Case:
    """A prefill that keeps the states of so many boundaries besides its end. Chunks computed again do not count."""
    model = DELTA_MODELS[name]
    heads, dim = model.value_heads, model.dim
    inputs, rows = _inputs(model, batch, tokens), array(batch, dtype=jnp.int32)
    numbers = array(batch, checkpoints, dtype=jnp.int32)

    def function(*arguments):
        *inputs, state, layer, reads, writes, lengths, kept_lengths, kept_slots = arguments
        q, k, v, log_decay, beta = _by_head(state, *inputs)
        options = {"checkpoint_lengths": kept_lengths, "checkpoint_slots": kept_slots}
        out, state = gated_delta(q, k, v, log_decay, beta, state, layer, reads, writes, lengths, **options)
        return out.reshape(*out.shape[:2], -1), state

    span, groups = tpu_grid.tokens_per_step(tokens), heads // model.key_heads
    edges = batch * heads // tpu_decode.heads_per_block(heads, groups, dim * dim * 4)
    return Case(
        "gated_delta", name, "prefill", function,
        (*inputs, _state(model, batch), array(dtype=jnp.int32), rows, rows, rows, numbers, numbers), len(inputs),
        batch * tokens, edges * -(-tokens // span), edges,
        (2 + checkpoints) * batch * _state_bytes(model) + total_bytes(*inputs) + batch * tokens * heads * dim * 4,
        batch * tokens * heads * dim * (2 * CHUNK + 3 * dim),
    )  # fmt: skip


def gated_delta_buffered_case(name: str, batch: int, ring_size: int = RING_SIZE) -> Case:
    """One step of buffered decode. The fewest bytes are those of an average step: a ring half full, and one state in
    `ring_size` written."""
    model = DELTA_MODELS[name]
    heads, dim = model.value_heads, model.dim
    inputs, rows = _inputs(model, batch, 1), array(batch, dtype=jnp.int32)
    ring, record = _records(model, RING_LAYERS, batch + 2, ring_size), total_bytes(*_records(model, batch))

    def function(*arguments):
        *inputs, state, k, u, decays, layer, read_slots, write_slots, cursors, lengths = arguments
        call = (*_by_head(state, *inputs), state, DeltaRecords(k, u, decays), layer)
        out, state, ring = buffered(*call, read_slots, write_slots, cursors, lengths)
        return out.reshape(*out.shape[:2], -1), state, *ring.leaves()

    groups = heads // model.key_heads
    steps = batch * heads // tpu_buffered.heads_per_block(model.key_heads, groups, dim * dim * 4)
    states = batch * _state_bytes(model)
    label = name if ring_size == RING_SIZE else f"{name}, ring of {ring_size}"
    return Case(
        "gated_delta", label, "buffered", function,
        (*inputs, _state(model, batch, RING_LAYERS), *ring, array(dtype=jnp.int32), rows, rows, rows, rows),
        (5, 6, 7, 8), batch, steps, steps // ring_size,
        states + states // ring_size + (ring_size + 1) * record // 2 + total_bytes(*inputs)
        + batch * heads * dim * 4, 0, rare=True,
    )  # fmt: skip


def record_cases() -> list[Case]:
    """What the TPU kernels are counted on."""
    models = ("Kimi Linear 48B", "Qwen3-Next 80B")
    return [
        *(gated_delta_verify_case(name, 64, tokens) for name in models for tokens in DRAFT_TOKENS),
        *(gated_delta_replay_case(name, 64, tokens) for name in models for tokens in DRAFT_TOKENS[1:]),
        *(gated_delta_buffered_case(name, 64) for name in models),
        gated_delta_buffered_case(models[0], 64, RING_SIZE // 2),
    ]
