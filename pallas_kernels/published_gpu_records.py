"""Published models' shapes for the GPU kernels of the recurrences' forms on update records."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.published_case import array, total_bytes
from pallas_kernels.published_gpu import DELTA, SSD, DeltaShape, SsdShape
from pallas_kernels.published_gpu_case import Arguments, GpuCase, rows_of_slots, state_of

RING_SIZE, DRAFT_TOKENS = 16, 8
VERIFY = ("read_slots", "lengths")
REPLAY = ("read_slots", "write_slots")
BUFFERED = ("read_slots", "write_slots", "cursors", "lengths")


def _forms(
    operator: str, model: str, batch: int, inputs: Any, records: Any, slot: jax.ShapeDtypeStruct, out: int, ring: int
) -> list[GpuCase]:
    """Verify and replay of DRAFT_TOKENS, and buffered decode. `inputs` and `records`: of [batch, tokens, ...] or, for
    rings, [*leading]; `out`: numbers of a token's output. A token's update and its output are not matrix products."""
    state, states = state_of(slot, batch), batch * total_bytes(slot)
    drafts, one = inputs(batch, DRAFT_TOKENS), inputs(batch, 1)
    draft_records = records(batch, DRAFT_TOKENS)
    rings = {f"ring_{name}": x for name, x in records(*state.shape[:2], ring).items()}
    record = total_bytes(*records(batch).values())
    replayed = {**draft_records, "accepted": array(batch, dtype=jnp.int32), "state": state}

    def case(form: str, tokens: int, arguments: Arguments, rows: tuple[str, ...], donated: Any, moved: int, outs: int):
        named = {**arguments, **rows_of_slots(batch, *rows)}
        return GpuCase(f"{operator}_{form}", model, (batch, tokens), {}, named, donated, moved, 0, outs)

    outputs = 4 * batch * out
    verified = states + total_bytes(*drafts.values(), *draft_records.values()) + DRAFT_TOKENS * outputs
    # Of an average step: a ring half full, and one state in a ringful written.
    buffered = states + states // ring + (ring + 1) * record // 2 + total_bytes(*one.values()) + outputs
    return [
        case("verify", DRAFT_TOKENS, {**drafts, "state": state}, VERIFY, (), verified, 4),
        case("replay", DRAFT_TOKENS, replayed, REPLAY, ("state",), 2 * states + DRAFT_TOKENS * record, 0),
        case("buffered", 1, {**one, "state": state, **rings}, BUFFERED, ("state", *rings), buffered, 1),
    ]


def gated_delta_record_cases(
    model: str, shape: DeltaShape, batch: int, dtype: Any = jnp.bfloat16, ring: int = RING_SIZE
) -> list[GpuCase]:
    """Its three forms."""
    heads, dim = shape.value_heads, shape.dim
    decay = (heads, dim) if shape.per_channel else (heads,)

    def inputs(*tokens: int) -> Arguments:
        keys = array(*tokens, shape.key_heads, dim, dtype=dtype)
        values, strength = array(*tokens, heads, dim, dtype=dtype), array(*tokens, heads)
        return {"q": keys, "k": keys, "v": values, "log_decay": array(*tokens, *decay), "beta": strength}

    def records(*tokens: int) -> Arguments:
        key, value = array(*tokens, shape.key_heads, dim), array(*tokens, heads, dim)
        return {"k": key, "u": value, "log_decay": array(*tokens, *decay)}

    return _forms("gated_delta", model, batch, inputs, records, array(heads, dim, dim), heads * dim, ring)


def ssd_record_cases(
    model: str, shape: SsdShape, batch: int, dtype: Any = jnp.bfloat16, ring: int = RING_SIZE
) -> list[GpuCase]:
    """Its three forms."""
    heads, dim, state_size = shape.heads, shape.dim, shape.state

    def inputs(*tokens: int) -> Arguments:
        shared, value = array(*tokens, shape.groups, state_size, dtype=dtype), array(*tokens, heads, dim, dtype=dtype)
        return {
            "x": value, "dt": array(*tokens, heads), "A": array(heads), "B": shared, "C": shared, "D": array(heads),
        }  # fmt: skip

    def records(*tokens: int) -> Arguments:
        written, added = array(*tokens, shape.groups, state_size), array(*tokens, heads * dim)
        return {"B": written, "dt_x": added, "log_decay": array(*tokens, heads)}

    return _forms("ssd", model, batch, inputs, records, array(heads, dim, state_size), heads * dim, ring)


def record_cases(batch: int) -> list[GpuCase]:
    """Every form and model."""
    return [
        *(case for model, shape in DELTA.items() for case in gated_delta_record_cases(model, shape, batch)),
        *(case for model, shape in SSD.items() for case in ssd_record_cases(model, shape, batch)),
    ]
