"""Nemotron-H and Nemotron 3 (`nemotron_h`): Mamba-2, attention without positions, squared-ReLU feed-forwards.

arXiv 2504.03624 (Nemotron-H) and 2512.20848 (Nemotron 3: mixture of experts; in the larger models experts that work on
a latent, and multi-token prediction). Every layer is one part, a mixer or a feed-forward.
"""

from jaxhybrid.config import ActivationSpec, AttentionSpec, DenseSpec, LayerSpec, Mamba2Spec, ModelConfig, MoeSpec
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.mamba2_keys import mamba2_weights, step_limit
from jaxhybrid.models.text_model import text_model
from jaxhybrid.models.weight_table import LayerPlace, WeightTable, trunk_weights

MODEL_TYPES = ("nemotron_h",)

RELU2 = ActivationSpec("relu2")
# `layers_block_type` spells the parts out; `hybrid_override_pattern` is a string of the letters.
LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
# What prediction layers are made of: attention and then experts, which together make one of our layers.
PREDICTION_PATTERN = "*E"
MOE_KEYS = (
    "n_shared_experts", "moe_shared_expert_overlap", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    "moe_shared_expert_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group",
    "moe_latent_size",
)  # fmt: skip


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    pattern = _pattern(read, "hybrid_override_pattern", "layers_block_type")
    read.require("num_hidden_layers", len(pattern))
    predictions = read.take("num_nextn_predict_layers", default=0)
    prediction_pattern = _pattern(read, "mtp_hybrid_override_pattern", "mtp_layers_block_type", PREDICTION_PATTERN)
    if predictions and prediction_pattern != PREDICTION_PATTERN:
        raise read.error(f"mtp pattern {prediction_pattern!r} is not supported, expected {PREDICTION_PATTERN!r}")
    read.require("mlp_hidden_act", "relu2")
    read.require("mlp_bias", False)
    read.require("residual_in_fp32", False)
    dense = DenseSpec(read.take("intermediate_size"), RELU2)
    attention = _attention_spec(read)
    parts = {"M": LayerSpec(_mamba_spec(read), None), "*": LayerSpec(attention, None), "-": LayerSpec(None, dense)}
    mtp_layers: tuple[LayerSpec, ...] = ()
    if "E" in pattern:
        moe = _moe_spec(read)
        parts["E"] = LayerSpec(None, moe)
        mtp_layers = (LayerSpec(attention, moe),) * predictions
    else:
        for name in MOE_KEYS:  # transformers 5 writes its defaults into files of models without experts
            read.take(name, default=None)
    return text_model(
        read,
        model_type="nemotron_h",
        layers=tuple(parts[letter] for letter in pattern),
        rms_norm_eps=read.take("layer_norm_epsilon", "norm_eps", "rms_norm_eps"),
        max_position_embeddings=read.take("max_position_embeddings"),
        mtp_layers=mtp_layers,
    )


def _pattern(read: ConfigReader, letters: str, names: str, default: str | None = None) -> str:
    """The schedule in letters, from whichever of the two keys there is."""
    pattern = read.take(letters, default=None)
    spelt = read.take(names, default=None)
    if spelt is not None:
        unknown = sorted(set(spelt) - set(LETTERS))
        if unknown:
            raise read.error(f"{names}: unknown parts {unknown}, expected {sorted(LETTERS)}")
        pattern = "".join(LETTERS[name] for name in spelt)
    if pattern is None and default is None:
        raise read.error(f"expected key {letters!r} or {names!r}, found none")
    pattern = pattern or default
    if not pattern or set(pattern) - set("M*-E"):
        raise read.error(f"{letters}={pattern!r}: expected the letters M, *, - and E")
    return pattern


def _attention_spec(read: ConfigReader) -> AttentionSpec:
    read.require("attention_bias", False)
    read.require("sliding_window", None)
    read.rope()  # present in released files and unused: every layer is without positions
    return AttentionSpec(
        num_attention_heads=read.take("num_attention_heads"),
        num_key_value_heads=read.take("num_key_value_heads"),
        head_dim=read.take("head_dim", "attention_head_dim"),
        rope=None,
    )


def _mamba_spec(read: ConfigReader) -> Mamba2Spec:
    read.require("mamba_hidden_act", "silu")
    read.require("mamba_proj_bias", False)
    # How dt_bias was drawn, and what only training or other implementations read. (transformers also limits the step
    # size by time_step_min, but in a prefill only: its decode, and everybody else, does not.)
    for name in ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"):
        read.take(name, default=None)
    for name in ("expand", "chunk_size", "mamba_ssm_cache_dtype"):
        read.take(name, default=None)
    return Mamba2Spec(
        num_heads=read.take("mamba_num_heads"),
        head_dim=read.take("mamba_head_dim"),
        n_groups=read.take("n_groups"),
        state_size=read.take("ssm_state_size", "mamba_d_state"),
        conv_kernel_size=read.take("conv_kernel"),
        conv_bias=read.take("use_conv_bias", default=True),
        proj_bias=read.take("use_bias", default=False),
        time_step_limit=step_limit(read),
    )


def _moe_spec(read: ConfigReader) -> MoeSpec:
    read.require("n_shared_experts", 1)
    read.take("moe_shared_expert_overlap", default=None)  # when the shared expert is computed, not what it is
    return MoeSpec(
        num_experts=read.take("n_routed_experts"),
        num_experts_per_tok=read.take("num_experts_per_tok"),
        moe_intermediate_size=read.take("moe_intermediate_size"),
        shared_intermediate_size=read.take("moe_shared_expert_intermediate_size"),
        shared_expert_gate=False,
        scoring="sigmoid",
        norm_topk_prob=read.take("norm_topk_prob", default=True),
        routed_scaling_factor=read.take("routed_scaling_factor", default=1.0),
        n_group=read.take("n_group", default=None) or 1,
        topk_group=read.take("topk_group", default=None) or 1,
        activation=RELU2,
        latent_size=read.take("moe_latent_size", default=None),
    )


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes."""
    trunk_weights(table, config, "backbone.embeddings", "backbone.norm_f")
    for number, place in enumerate(table.layers):
        _part(place, f"backbone.layers.{number}", "mixer" if place.spec.mixer is not None else "ffn")
    for number, place in enumerate(table.mtp):
        first, second = f"mtp.layers.{2 * number}", f"mtp.layers.{2 * number + 1}"
        _part(place, first, "mixer")
        _part(place, second, "ffn")
        for name in ("enorm", "hnorm", "eh_proj"):
            table.add(f"{first}.{name}.weight", ("mtp", number, name, "weight"))
        table.add(f"{second}.final_layernorm.weight", ("mtp", number, "norm", "weight"))


def _part(place: LayerPlace, prefix: str, part: str) -> None:
    """One published block: the `mixer` or the `ffn` of a layer."""
    place.add(f"{prefix}.norm.weight", f"{part}_norm", "weight")
    spec = place.spec.mixer if part == "mixer" else place.spec.ffn
    prefix = f"{prefix}.mixer"
    match spec:
        case Mamba2Spec():
            mamba2_weights(place, prefix, spec, "mixer")
        case AttentionSpec():
            place.attention(prefix)
        case DenseSpec():
            _feed_forward(place, prefix, "ffn")
        case MoeSpec():
            _moe(place, prefix, spec)


def _feed_forward(place: LayerPlace, prefix: str, *path: str) -> None:
    for name in ("up_proj", "down_proj"):
        place.add(f"{prefix}.{name}.weight", *path, name, "weight")


def _moe(place: LayerPlace, prefix: str, spec: MoeSpec) -> None:
    place.add(f"{prefix}.gate.weight", "ffn", "router", "weight")
    place.add(f"{prefix}.gate.e_score_correction_bias", "ffn", "e_score_correction_bias")
    place.experts(f"{prefix}.experts.{{expert}}.{{part}}.weight", gate=None, up="up_proj", down="down_proj")
    _feed_forward(place, f"{prefix}.shared_experts", "ffn", "shared_expert")
    if spec.latent_size is not None:
        for name in ("fc1_latent_proj", "fc2_latent_proj"):
            place.add(f"{prefix}.{name}.weight", "ffn", name, "weight")
