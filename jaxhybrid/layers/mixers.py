"""Which module implements which spec: mixers and feed-forwards.

A mixer is built as `Mixer(spec, context)` and called as `mixer(x, state, index, step) -> (y, state)`: `state` holds the
arrays of its group in the pool, of which it touches layer `index` only. A feed-forward is built alike and called as
`ffn(x, step) -> y`.
"""

from collections.abc import Mapping
from typing import Any

from jaxhybrid.config import (
    AttentionMamba2Spec,
    AttentionSpec,
    CompressedAttentionSpec,
    DenseSpec,
    FfnSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LatentAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    MoeSpec,
)
from jaxhybrid.layers.attention import Attention
from jaxhybrid.layers.attention_mamba2 import AttentionMamba2
from jaxhybrid.layers.compressed_attention import CompressedAttention
from jaxhybrid.layers.context import LayerContext
from jaxhybrid.layers.feed_forward import Dense
from jaxhybrid.layers.gated_delta_net import GatedDeltaNet
from jaxhybrid.layers.kimi_delta import KimiDelta
from jaxhybrid.layers.latent_attention import LatentAttention
from jaxhybrid.layers.mamba1 import Mamba1
from jaxhybrid.layers.mamba2 import Mamba2
from jaxhybrid.layers.mixture_of_experts import MixtureOfExperts

MODULES: Mapping[type, type] = {
    AttentionSpec: Attention,
    LatentAttentionSpec: LatentAttention,
    CompressedAttentionSpec: CompressedAttention,
    KimiDeltaSpec: KimiDelta,
    GatedDeltaNetSpec: GatedDeltaNet,
    Mamba2Spec: Mamba2,
    Mamba1Spec: Mamba1,
    AttentionMamba2Spec: AttentionMamba2,
    DenseSpec: Dense,
    MoeSpec: MixtureOfExperts,
}


def build(spec: MixerSpec | FfnSpec, context: LayerContext) -> Any:
    """The module of a mixer's or feed-forward's spec."""
    return MODULES[type(spec)](spec, context)
