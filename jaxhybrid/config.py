"""What a model is made of, spelt out: one frozen spec per layer, no family names.

`models/` translates a published config.json into these; everything else reads only these.
"""

from dataclasses import dataclass
from typing import Literal

from jaxhybrid.errors import ConfigError


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions over the first `rotary_dim` channels of a head, rotated as two halves."""

    theta: float
    rotary_dim: int


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention with a key and a value per token."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: RopeSpec | None
    qk_norm: bool
    output_gate: bool

    kind: Literal["attention"] = "attention"


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention: one latent and one shared key part per token (DeepSeek-V2, arXiv 2405.04434)."""

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool

    kind: Literal["latent_attention"] = "latent_attention"


@dataclass(frozen=True)
class KimiDeltaSpec:
    """Kimi Delta Attention: delta rule with a decay per key channel (arXiv 2510.26692)."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int

    kind: Literal["kimi_delta"] = "kimi_delta"


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    """Gated DeltaNet: delta rule with a decay per value head (arXiv 2412.06464)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int

    kind: Literal["gated_delta_net"] = "gated_delta_net"

    @property
    def conv_dim(self) -> int:
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class DenseSpec:
    """SwiGLU feed-forward."""

    intermediate_size: int

    kind: Literal["dense"] = "dense"


@dataclass(frozen=True)
class MoeSpec:
    """Routed SwiGLU experts and, if `shared_intermediate_size` is not 0, one expert every token passes."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    shared_expert_gate: bool
    scoring: Literal["softmax", "sigmoid"]
    norm_topk_prob: bool
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1

    kind: Literal["moe"] = "moe"


MixerSpec = AttentionSpec | LatentAttentionSpec | KimiDeltaSpec | GatedDeltaNetSpec
FfnSpec = DenseSpec | MoeSpec


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: h += mixer(norm(h)); h += ffn(norm(h))."""

    mixer: MixerSpec
    ffn: FfnSpec


@dataclass(frozen=True)
class ModelConfig:
    """A whole text model. `zero_centred_norms`: layer, query, key and final norms scale by (1 + w)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    zero_centred_norms: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    mtp_layers: tuple[LayerSpec, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_position_embeddings"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.layers:
            raise ConfigError("a model needs at least one layer")
