"""What a model is made of, spelt out: one frozen spec per layer, no family names.

`models/` translates a published config.json into these; everything else reads only these.
"""

import math
from dataclasses import dataclass
from typing import Literal

from jaxhybrid.errors import ConfigError
from jaxhybrid.vision_spec import VisionSpec


def _check_divides(parts: int, whole: int, what: str) -> None:
    if whole % parts:
        raise ConfigError(f"expected {what}, got {whole} and {parts}")


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware base, raised once a sequence is longer than `original_max_position_embeddings`."""

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a blend between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ConfigError(f"expected low_freq_factor below high_freq_factor, got {low} and {high}")


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a blend by wavelength, and a factor on cos and sin."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        if self.beta_fast < self.beta_slow:
            raise ConfigError(f"expected beta_fast from beta_slow up, got {self.beta_fast} and {self.beta_slow}")


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions over the first `rotary_dim` channels of a head.

    Rotated as two halves, or, if `interleaved`, as neighbouring pairs. `sections`: pairs that turn by time, height and
    width where a token of an image has three positions (interleaved MRoPE, Qwen3-VL).
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: RopeScaling | None = None
    sections: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ConfigError(f"expected rope over an even number of a head's channels, got {self.rotary_dim}")
        if self.sections is not None and 2 * sum(self.sections) != self.rotary_dim:
            raise ConfigError(f"expected mrope_section of {self.rotary_dim // 2} pairs, got {self.sections}")
        if self.rotary_dim == 2 and isinstance(self.scaling, DynamicScaling):
            raise ConfigError("dynamic rope scaling needs more than one pair of channels")
        if self.sections is not None and isinstance(self.scaling, DynamicScaling):
            raise ConfigError("dynamic rope scaling goes by one position, mrope_section by three: not both")


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention with a key and a value per token.

    `sliding_window`: tokens a query sees, itself included. `sinks`: a learned logit per head joins the softmax.
    `scale`: on the scores, head_dim ** -0.5 if None. `kv_copies`: how often every key/value head is kept; more than
    once where fewer of them than shards of a mesh would leave a shard without its own.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: RopeSpec | None
    qk_norm: bool = False
    output_gate: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    sliding_window: int | None = None
    sinks: bool = False
    logit_softcap: float | None = None
    scale: float | None = None
    kv_copies: int = 1

    kind: Literal["attention"] = "attention"

    def __post_init__(self) -> None:
        kv_heads = self.num_key_value_heads
        _check_divides(kv_heads, self.num_attention_heads, "num_attention_heads in groups of num_key_value_heads")
        if self.head_dim <= 0:
            raise ConfigError(f"expected a positive head_dim, got {self.head_dim}: more heads than hidden_size")


@dataclass(frozen=True)
class IndexerSpec:
    """The lightning indexer of DeepSeek sparse attention: each token attends to the `top_k` best of those before it."""

    num_heads: int
    head_dim: int
    top_k: int
    rope: RopeSpec

    def __post_init__(self) -> None:
        if self.rope.rotary_dim > self.head_dim:
            raise ConfigError(f"expected an index_head_dim from {self.rope.rotary_dim} (rope) up, got {self.head_dim}")


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention: one latent and one shared key part per token (DeepSeek-V2, arXiv 2405.04434).

    `rope`: over the shared key part; None leaves it without positions. `scale_factor`: on the usual
    (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, as YaRN's squared mscale. `indexer`: chooses the tokens that are
    attended to; "shared" takes the choice of the last layer that has one; None attends to all.
    """

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool = False
    rope: RopeSpec | None = None
    scale_factor: float = 1.0
    indexer: IndexerSpec | Literal["shared"] | None = None

    kind: Literal["latent_attention"] = "latent_attention"


@dataclass(frozen=True)
class CompressedAttentionSpec:
    """DeepSeek-V4's attention: a window of tokens and, with a `stride`, one entry for every so many tokens before.

    One vector of `head_dim` is key and value of all heads; `rope` turns its last channels. `overlap`: an entry pools
    two windows instead of one. `indexer`: chooses entries; None attends to all. Outputs pass `o_groups` low-rank
    projections. arXiv 2606.19348, section 2.3.
    """

    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    rope: RopeSpec
    sliding_window: int
    o_groups: int
    o_lora_rank: int
    stride: int | None = None
    overlap: bool = False
    indexer: IndexerSpec | None = None

    kind: Literal["compressed_attention"] = "compressed_attention"

    def __post_init__(self) -> None:
        _check_divides(self.o_groups, self.num_attention_heads, "num_attention_heads in o_groups")
        if self.rope.rotary_dim > self.head_dim:
            raise ConfigError(f"expected a head_dim from {self.rope.rotary_dim} (rope) up, got {self.head_dim}")


@dataclass(frozen=True)
class KimiDeltaSpec:
    """Kimi Delta Attention: delta rule with a decay per key channel (arXiv 2510.26692).

    `gate_lower_bound`: log-decays lie between it and 0, by a sigmoid instead of a softplus (Kimi K3, 2607.24653).
    `full_rank_gate`: the output gate is one projection instead of a product of two.
    """

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None = None
    full_rank_gate: bool = False

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

    def __post_init__(self) -> None:
        _check_divides(self.num_key_heads, self.num_value_heads, "value heads in groups of a key head")

    @property
    def conv_dim(self) -> int:
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class Mamba2Spec:
    """Mamba-2: a decay per head and token, B and C shared by the heads of a group (arXiv 2405.21060).

    `norm`: over each group's channels, after the gate. `time_step_limit`: least and greatest step size. `in_scales`:
    on the parts z, x, B, C and dt of what the input projection returns.
    """

    num_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_kernel_size: int
    conv_bias: bool = True
    proj_bias: bool = False
    norm: bool = True
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    in_scales: tuple[float, float, float, float, float] | None = None

    kind: Literal["mamba2"] = "mamba2"

    def __post_init__(self) -> None:
        _check_divides(self.n_groups, self.num_heads, "Mamba-2's heads in n_groups")
        if self.time_step_limit[0] > self.time_step_limit[1]:
            raise ConfigError(f"expected a time_step_limit that rises, got {self.time_step_limit}")

    @property
    def intermediate_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.intermediate_size + 2 * self.n_groups * self.state_size


@dataclass(frozen=True)
class Mamba1Spec:
    """Mamba-1: a decay per channel, state and token (arXiv 2312.00752), with Jamba's norms inside (2403.19887)."""

    intermediate_size: int
    state_size: int
    conv_kernel_size: int
    dt_rank: int
    conv_bias: bool = True
    proj_bias: bool = False

    kind: Literal["mamba1"] = "mamba1"


@dataclass(frozen=True)
class AttentionMamba2Spec:
    """Attention and Mamba-2 side by side on one input: the sum of their scaled outputs (Falcon-H1, 2507.22448)."""

    attention: AttentionSpec
    mamba: Mamba2Spec
    attention_scale: float = 1.0
    mamba_scale: float = 1.0

    kind: Literal["attention_mamba2"] = "attention_mamba2"


@dataclass(frozen=True)
class ActivationSpec:
    """What lies between a feed-forward's projections; see `layers/activation.py`.

    `silu`, `gelu_tanh`: act(gate) * up. `relu2`: relu(up)^2, of a feed-forward without a gate. `gpt_oss`: gate *
    sigmoid(1.702 gate) * (up + 1). `limit`: gate is cut at it from above, up on both sides, before anything else.
    `situ`: SiLU and up squashed softly, beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta).
    """

    name: Literal["silu", "gelu_tanh", "relu2", "gpt_oss", "situ"] = "silu"
    limit: float | None = None
    beta: float = 1.0
    linear_beta: float | None = None

    @property
    def gated(self) -> bool:
        return self.name != "relu2"


SILU = ActivationSpec("silu")


@dataclass(frozen=True)
class DenseSpec:
    """Feed-forward: down(act(gate x) * up x), or down(act(up x)) if the activation has no gate.

    `gate_scale` and `down_scale` multiply what those two projections return.
    """

    intermediate_size: int
    activation: ActivationSpec = SILU
    gate_scale: float = 1.0
    down_scale: float = 1.0

    kind: Literal["dense"] = "dense"

    def __post_init__(self) -> None:
        if self.intermediate_size <= 0:
            raise ConfigError(f"expected a positive size of a feed-forward, got {self.intermediate_size}")


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts and, if `shared_intermediate_size` is not 0, one expert every token passes.

    `scoring`: see `layers/router.py`. `hashed`: a token's id says which experts it goes to, its scores how much.
    `latent_size`: routed experts work on a projection of that size, and their sum is projected back; with
    `latent_norm`, past a norm. `biases`: router and routed experts have them.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    shared_expert_gate: bool
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    norm_topk_prob: bool
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    activation: ActivationSpec = SILU
    biases: bool = False
    latent_size: int | None = None
    latent_norm: bool = False
    hashed: bool = False

    kind: Literal["moe"] = "moe"

    def __post_init__(self) -> None:
        _check_divides(self.n_group, self.num_experts, "experts in n_group groups")
        if not 1 <= self.topk_group <= self.n_group:
            raise ConfigError(f"expected a topk_group from 1 to n_group={self.n_group}, got {self.topk_group}")
        eligible = self.num_experts // self.n_group * self.topk_group
        if not 1 <= self.num_experts_per_tok <= eligible:
            raise ConfigError(
                f"expected from 1 to {eligible} of {self.num_experts} experts a token, got {self.num_experts_per_tok}"
            )

    @property
    def corrected(self) -> bool:
        """Whether a learned bias takes part in the choice of experts."""
        return self.scoring != "softmax" and not self.hashed


MixerSpec = (
    AttentionSpec
    | LatentAttentionSpec
    | CompressedAttentionSpec
    | KimiDeltaSpec
    | GatedDeltaNetSpec
    | Mamba2Spec
    | Mamba1Spec
    | AttentionMamba2Spec
)
FfnSpec = DenseSpec | MoeSpec


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: h += mixer(norm(h)); h += ffn(norm(h)). Either part may be absent.

    `post_norms`: what a part returns passes a norm of its own before it is added. `seals_block`: with attention
    residuals, the sum so far becomes a block here, and a new sum begins.
    """

    mixer: MixerSpec | None
    ffn: FfnSpec | None
    post_norms: bool = False
    seals_block: bool = False

    def __post_init__(self) -> None:
        if self.mixer is None and self.ffn is None:
            raise ConfigError("a layer needs a mixer or a feed-forward")


@dataclass(frozen=True)
class PlainResidual:
    """x + scale f(x)."""

    scale: float = 1.0

    kind: Literal["plain"] = "plain"


@dataclass(frozen=True)
class AttentionResidual:
    """Each part of a layer sees a softmax mixture of the sealed blocks and the sum so far (arXiv 2603.15031)."""

    kind: Literal["attention"] = "attention"


@dataclass(frozen=True)
class HyperConnections:
    """Several streams, mixed at every part of a layer by weights that are made of them (arXiv 2409.19606, 2606.19348).

    `sinkhorn_iterations`: of rows and columns of the mixing matrix, towards a doubly stochastic one.
    """

    streams: int
    sinkhorn_iterations: int
    eps: float

    kind: Literal["hyper_connections"] = "hyper_connections"


ResidualSpec = PlainResidual | AttentionResidual | HyperConnections


@dataclass(frozen=True)
class ModelConfig:
    """A whole text model, and perhaps its vision tower.

    `zero_centred_norms`: layer, query, key and final norms scale by (1 + w).
    `embedding_scale` multiplies token embeddings, rounded to their dtype first; `logit_scale` multiplies logits.
    """

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
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    residual: ResidualSpec = PlainResidual()
    vision: VisionSpec | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_position_embeddings"):
            if not 0 < getattr(self, name) < 2**31:
                raise ConfigError(f"{name} must be positive and below 2**31, got {getattr(self, name)}")
        if not self.layers:
            raise ConfigError("a model needs at least one layer")
        if self.vision is not None:
            if self.vision.out_hidden_size != self.hidden_size:
                sizes = f"{self.vision.out_hidden_size} and {self.hidden_size}"
                raise ConfigError(f"expected a tower's out_hidden_size to be the text's hidden_size, got {sizes}")
            if beyond := [token for token in self.vision.placeholder_ids if token >= self.vocab_size]:
                raise ConfigError(f"expected placeholder tokens below vocab_size={self.vocab_size}, got {beyond}")
