"""What a model is and what its state costs, from its configuration alone: no weights are read."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxhybrid.config import AttentionSpec, CompressedAttentionSpec, LayerSpec, ModelConfig, MoeSpec
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.decoder import abstract_decoder
from jaxhybrid.layers.segments import plan_segments
from jaxhybrid.state.layout import StateDtypes, StateLayout, layout_of


@dataclass(frozen=True)
class Description:
    """Sizes of a model in one choice of dtypes.

    parameters: of everything but prediction layers. active: those a token of text passes: not experts it isn't sent to
    and, unless it is the head too, not the embedding, of which it reads one row. mtp_parameters: of prediction layers.
    schedule: runs of layers, such as `12 x (3 x gated_delta_net + moe, attention + moe)`.
    bytes_per_token, bytes_per_sequence: of state that grows, and of state of fixed size (the next token's logits not
    counted). windowed_bytes_per_token: the part of bytes_per_token in layers that see a window only.
    logits_bytes: kept beside the state of every sequence. weight_bytes: of all parameters.
    """

    parameters: int
    active: int
    mtp_parameters: int
    schedule: str
    bytes_per_token: int
    windowed_bytes_per_token: int
    bytes_per_sequence: int
    logits_bytes: int
    weight_bytes: int

    @property
    def snapshot_tokens(self) -> float:
        """Tokens of growing state that take as much memory as one snapshot of the rest; infinite if nothing grows."""
        if self.bytes_per_sequence == 0:
            return 0.0
        return self.bytes_per_sequence / self.bytes_per_token if self.bytes_per_token else math.inf

    def sequences(self, memory: int, context: int, page_size: int) -> int:
        """How many sequences of `context` tokens fit beside the weights, in pages of their own, into `memory` bytes."""
        tokens = -(-context // page_size) * page_size
        each = self.bytes_per_sequence + self.logits_bytes + tokens * self.bytes_per_token
        return max(0, memory - self.weight_bytes) // each


def describe(config: ModelConfig, dtype: DTypeLike = "bfloat16", state_dtype: str = "float32") -> Description:
    """Sizes with weights and cache in `dtype`, and recurrent state in `state_dtype`."""
    layout = layout_of(config.layers, StateDtypes(state_dtype, jax.numpy.dtype(dtype).name))
    leaves = dict(nnx.to_flat_state(nnx.split(abstract_decoder(config, Execution(True, True), dtype))[1]))
    sizes = {path: math.prod(variable.shape) for path, variable in leaves.items()}
    of_part = {part: sum(size for path, size in sizes.items() if path[0] == part) for part in ("mtp", "visual")}
    total = sum(sizes.values()) - of_part["mtp"]
    embedding = 0 if config.tie_word_embeddings else sizes[("embed_tokens",)]
    idle = sum(_idle(layer.ffn, config.hidden_size) for layer in config.layers if isinstance(layer.ffn, MoeSpec))
    return Description(
        parameters=total,
        active=total - of_part["visual"] - embedding - idle,
        mtp_parameters=of_part["mtp"],
        schedule=_schedule(config.layers),
        bytes_per_token=layout.bytes_per_token,
        windowed_bytes_per_token=_windowed(config.layers, layout),
        bytes_per_sequence=layout.bytes_per_slot,
        logits_bytes=4 * config.vocab_size,
        weight_bytes=sum(size * np.dtype(leaves[path].dtype).itemsize for path, size in sizes.items()),
    )


def _idle(spec: MoeSpec, hidden_size: int) -> int:
    """Parameters of the experts that a token is not sent to."""
    width, inner = spec.latent_size or hidden_size, spec.moe_intermediate_size
    into = 2 if spec.activation.gated else 1
    each = (into + 1) * width * inner + (into * inner + width if spec.biases else 0)
    return (spec.num_experts - spec.num_experts_per_tok) * each


def _windowed(layers: Sequence[LayerSpec], layout: StateLayout) -> int:
    groups = {
        group
        for layer, group in zip(layers, layout.groups, strict=True)
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.sliding_window is not None
    }
    return sum(leaf.bytes for leaf in layout.paged if leaf.group in groups)


def _schedule(layers: Sequence[LayerSpec]) -> str:
    return ", ".join(
        _times(plan.repeats, ", ".join(_times(count, name) for name, count in _runs(map(_name, plan.pattern))))
        for plan in plan_segments(layers, scan=True)
    )


def _name(layer: LayerSpec) -> str:
    mixer = layer.mixer
    kind: str | None = mixer.kind if mixer is not None else None
    match mixer:
        case AttentionSpec(sliding_window=int(detail)) | CompressedAttentionSpec(stride=int(detail)):
            kind = f"{kind}({detail})"
    return " + ".join(filter(None, (kind, layer.ffn.kind if layer.ffn is not None else None)))


def _runs(names: Iterable[str]) -> list[tuple[str, int]]:
    return [(name, len(list(run))) for name, run in itertools.groupby(names)]


def _times(count: int, what: str) -> str:
    if count == 1:
        return what
    return f"{count} x ({what})" if re.search(r",| x ", what) else f"{count} x {what}"
