"""Mamba-2 on TPU: a kernel for one token of many rows, and one for chunks of tokens."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.ssd import tpu_decode, tpu_prefill
from pallas_kernels.ssd.tpu_decode import TILE
from pallas_kernels.ssd.tpu_inputs import Given
from pallas_kernels.tpu_sums import CHUNK, LANES


def accepts(
    x: Array, dt: Array, A: Array, B: Array, *_: Any, checkpoint_lengths: Array | None = None, **__: Any
) -> str | None:
    """Why the kernels cannot run these arguments of `ssd`, or None."""
    (heads, head_dim), (groups, width) = x.shape[2:], B.shape[2:]
    chunked = x.shape[1] > 1 or checkpoint_lengths is not None
    if width % 128:
        return f"state_size {width} is not a multiple of 128"
    if head_dim % TILE and (TILE % head_dim or head_dim < 16):
        return f"head_dim {head_dim} is not 16, 32, 64 or a multiple of {TILE}"
    if heads // groups * head_dim % TILE:
        return f"{heads // groups} heads of {head_dim} a group are not a multiple of {TILE}"
    return accepts_chunks(heads, head_dim, groups, width) if chunked else None


def accepts_chunks(heads: int, head_dim: int, groups: int, state_size: int) -> str | None:
    """Why several tokens of such heads cannot be run, or None."""
    if state_size % LANES:
        return f"state_size {state_size} is not a multiple of {LANES}"
    if head_dim % CHUNK:
        return f"head_dim {head_dim} is not a multiple of {CHUNK}, for several tokens"
    if heads // groups % 2:
        return f"{heads // groups} heads a group are not even, for several tokens"
    return None


def ssd(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G N"],
    C: Float[Array, "B T G N"],
    D: Float[Array, " H"],
    state: Float[Array, "L S H P N"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H P"], Float[Array, "L S H P N"]]:
    """Arguments and result as in `pallas_kernels.ssd.ssd`; `interpret` as of `pallas_call`."""
    slots = (layer, read_slots, write_slots, lengths)
    checkpoints = None
    if checkpoint_lengths is not None and checkpoint_slots is not None:
        checkpoints = checkpoint_lengths, checkpoint_slots
    if x.shape[1] > 1 or checkpoints is not None:
        out, (state,) = tpu_prefill.prefill(Given(x, B, C), dt, A, D, state, *slots, checkpoints, interpret=interpret)
        return out, state
    token = (x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D)
    out, state = tpu_decode.decode(*token, state, *slots, interpret=interpret)
    return out[:, None], state
