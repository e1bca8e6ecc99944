"""The gated delta rule on TPU: a kernel for one token of many rows, and one for chunks of tokens."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta import tpu_decode, tpu_prefill
from pallas_kernels.gated_delta.tpu_inputs import Given


def accepts(q: Array, k: Array, v: Array, *_: Any, **__: Any) -> str | None:
    """Why the kernels cannot run these arguments of `gated_delta`, or None."""
    return tpu_decode.accepts_widths(q.shape[3], v.shape[3])


def gated_delta(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    log_decay: Float[Array, "B T Hv"] | Float[Array, "B T Hv dk"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    checkpoint_lengths: Int[Array, "B M"] | None = None,
    checkpoint_slots: Int[Array, "B M"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "L N Hv dk dv"]]:
    """Arguments and result as in `pallas_kernels.gated_delta.gated_delta`; `interpret` as of `pallas_call`."""
    slots = (layer, read_slots, write_slots, lengths)
    checkpoints = None
    if checkpoint_lengths is not None and checkpoint_slots is not None:
        checkpoints = checkpoint_lengths, checkpoint_slots
    if q.shape[1] > 1 or checkpoints is not None:
        inputs = Given(q, k, v)
        out, (state,) = tpu_prefill.prefill(inputs, log_decay, beta, state, *slots, checkpoints, interpret=interpret)
        return out, state
    token = (q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], beta[:, 0])
    out, state = tpu_decode.decode(*token, state, *slots, interpret=interpret)
    return out[:, None], state
