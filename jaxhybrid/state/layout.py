"""Which arrays hold a model's state: one group per kind of mixer, stacked over the layers of that kind."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxhybrid.config import (
    AttentionMamba2Spec,
    AttentionSpec,
    CompressedAttentionSpec,
    GatedDeltaNetSpec,
    IndexerSpec,
    KimiDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
)

Growth = Literal["paged", "fixed"]

OUTPUT = "output"  # the group of what belongs to no layer: the next token's logits


@dataclass(frozen=True)
class LeafSpec:
    """One array of a group: `shape` per token if `paged`, per slot if `fixed`; stacked over `layers`.

    A paged leaf may have one entry for every `stride` tokens; it lies in the page of the last of them.
    """

    group: str
    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: str
    growth: Growth
    axes: tuple[str | None, ...]
    stride: int = 1

    @property
    def leading(self) -> int:
        """Dimensions of its array before `shape`: layers and slots; or layers, pages and a page's tokens."""
        return 2 if self.growth == "fixed" else 3

    @property
    def bytes(self) -> int:
        """Bytes of all layers, per token (paged) or per slot (fixed)."""
        return self.layers * math.prod(self.shape) * np.dtype(self.dtype).itemsize // self.stride


@dataclass(frozen=True)
class StateLayout:
    """`groups[l]` and `ordinals[l]` say where layer l keeps its state: group, and index within the group's stack.

    A layer without a mixer has the group None.
    """

    groups: tuple[str | None, ...]
    ordinals: tuple[int, ...]
    leaves: tuple[LeafSpec, ...]

    @property
    def fixed(self) -> tuple[LeafSpec, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.growth == "fixed")

    @property
    def paged(self) -> tuple[LeafSpec, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.growth == "paged")

    @property
    def recurrent(self) -> bool:
        """Whether a prefix can only be resumed where a snapshot of its fixed-size state was kept."""
        return any(leaf.group != OUTPUT for leaf in self.fixed)

    @property
    def bytes_per_token(self) -> int:
        return sum(leaf.bytes for leaf in self.paged)

    @property
    def bytes_per_slot(self) -> int:
        return sum(leaf.bytes for leaf in self.fixed)


@dataclass(frozen=True)
class StateDtypes:
    """`state`: recurrent memory. `cache`: keys, values, latents and convolution inputs."""

    state: str = "float32"
    cache: str = "float32"


def layout_of(
    layers: Sequence[LayerSpec], dtypes: StateDtypes = StateDtypes(), vocab_size: int | None = None
) -> StateLayout:
    """Layers with equal mixer specs share a group. `vocab_size` adds the next token's logits to each slot."""
    names: dict[MixerSpec, str] = {}
    counts: dict[str, int] = {}
    groups: list[str | None] = []
    ordinals = []
    for layer in layers:
        if layer.mixer is None:
            groups.append(None)
            ordinals.append(0)
            continue
        twins = sum(known.kind == layer.mixer.kind for known in names)
        group = names.setdefault(layer.mixer, layer.mixer.kind + (f".{twins}" if twins else ""))
        groups.append(group)
        ordinals.append(counts.get(group, 0))
        counts[group] = counts.get(group, 0) + 1
    leaves = [leaf for mixer, group in names.items() for leaf in _leaves(mixer, group, counts[group], dtypes)]
    if vocab_size is not None:
        leaves.append(LeafSpec(OUTPUT, "logits", 1, (vocab_size,), "float32", "fixed", ("vocab",)))
    return StateLayout(tuple(groups), tuple(ordinals), tuple(leaves))


def _leaves(mixer: MixerSpec, group: str, layers: int, dtypes: StateDtypes) -> list[LeafSpec]:
    match mixer:
        case AttentionSpec():
            # Flat: a TPU pads the last dimension to 128 and the one before to 8 or 16.
            shape = (mixer.num_key_value_heads * mixer.kv_copies * mixer.head_dim,)
            return [LeafSpec(group, name, layers, shape, dtypes.cache, "paged", ("kv_heads",)) for name in ("k", "v")]
        case LatentAttentionSpec():
            widths = {"latent": mixer.kv_lora_rank + mixer.qk_rope_head_dim}
            if isinstance(mixer.indexer, IndexerSpec):
                widths["index_key"] = mixer.indexer.head_dim
            return [
                LeafSpec(group, name, layers, (width,), dtypes.cache, "paged", (None,))
                for name, width in widths.items()
            ]
        case CompressedAttentionSpec():
            return _compressed_leaves(mixer, group, layers, dtypes)
        case KimiDeltaSpec():
            return _kimi_delta_leaves(mixer, group, layers, dtypes)
        case GatedDeltaNetSpec():
            state = (mixer.num_value_heads, mixer.key_head_dim, mixer.value_head_dim)
            return _recurrent_leaves(group, layers, state, (mixer.conv_kernel_size - 1, mixer.conv_dim), dtypes)
        case Mamba2Spec():
            return _mamba2_leaves(mixer, group, layers, dtypes)
        case Mamba1Spec():
            return _mamba1_leaves(mixer, group, layers, dtypes)
        case AttentionMamba2Spec():
            return [leaf for part in (mixer.attention, mixer.mamba) for leaf in _leaves(part, group, layers, dtypes)]


def _compressed_leaves(mixer: CompressedAttentionSpec, group: str, layers: int, dtypes: StateDtypes) -> list[LeafSpec]:
    window = (mixer.sliding_window - 1, mixer.head_dim)
    leaves = [LeafSpec(group, "window", layers, window, dtypes.cache, "fixed", (None, None))]
    if mixer.stride is None:
        return leaves
    # Of a window that is not complete: maximum, sum and weighted sum, of each series and of the last window's first.
    sums = (3 if mixer.overlap else 1, 3)
    widths = {"": mixer.head_dim} | ({"index_": mixer.indexer.head_dim} if mixer.indexer else {})
    for prefix, width in widths.items():
        entries, pooling = f"{prefix}entries", f"{prefix}pooling"
        leaves.append(LeafSpec(group, entries, layers, (width,), dtypes.cache, "paged", (None,), mixer.stride))
        leaves.append(LeafSpec(group, pooling, layers, (*sums, width), "float32", "fixed", (None, None, None)))
    return leaves


def _kimi_delta_leaves(mixer: KimiDeltaSpec, group: str, layers: int, dtypes: StateDtypes) -> list[LeafSpec]:
    """Queries, keys and values each with convolution inputs of their own: a mesh cuts every one of them by heads."""
    heads, dim = mixer.num_heads, mixer.head_dim
    conv = (mixer.short_conv_kernel_size - 1, heads * dim)
    return [
        LeafSpec(group, "recurrent", layers, (heads, dim, dim), dtypes.state, "fixed", ("heads", None, None)),
        *(LeafSpec(group, f"conv_{name}", layers, conv, dtypes.cache, "fixed", (None, "heads")) for name in "qkv"),
    ]


def _mamba2_leaves(mixer: Mamba2Spec, group: str, layers: int, dtypes: StateDtypes) -> list[LeafSpec]:
    """B's and C's convolution inputs apart from x's: they belong to no head."""
    state, taps = (mixer.num_heads, mixer.head_dim, mixer.state_size), mixer.conv_kernel_size - 1
    shared = (taps, mixer.conv_dim - mixer.intermediate_size)
    return [
        LeafSpec(group, "recurrent", layers, state, dtypes.state, "fixed", ("heads", None, None)),
        LeafSpec(group, "conv_x", layers, (taps, mixer.intermediate_size), dtypes.cache, "fixed", (None, "heads")),
        LeafSpec(group, "conv_bc", layers, shared, dtypes.cache, "fixed", (None, None)),
    ]


def _mamba1_leaves(mixer: Mamba1Spec, group: str, layers: int, dtypes: StateDtypes) -> list[LeafSpec]:
    """Channels last in both: a channel's state is too short to lie along registers."""
    axes = (None, "heads")
    state, conv = ((rows, mixer.intermediate_size) for rows in (mixer.state_size, mixer.conv_kernel_size - 1))
    return [
        LeafSpec(group, "recurrent", layers, state, dtypes.state, "fixed", axes),
        LeafSpec(group, "conv", layers, conv, dtypes.cache, "fixed", axes),
    ]


def _recurrent_leaves(
    group: str, layers: int, state: tuple[int, ...], conv: tuple[int, ...], dtypes: StateDtypes
) -> list[LeafSpec]:
    return [
        LeafSpec(group, "recurrent", layers, state, dtypes.state, "fixed", ("heads", *(None,) * (len(state) - 1))),
        LeafSpec(group, "conv", layers, conv, dtypes.cache, "fixed", (None, "heads")),
    ]
