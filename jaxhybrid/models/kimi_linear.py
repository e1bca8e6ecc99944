"""Kimi Linear (`kimi_linear`): KDA and MLA layers, mixture of experts. arXiv 2510.26692.

Also read, from Kimi K3's text config: `mla_use_output_gate`. And, under DeepSeek-V3's names, multi-token-prediction
layers where `num_nextn_predict_layers` says so.
"""

from jaxhybrid.config import (
    DenseSpec,
    FfnSpec,
    KimiDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    MixerSpec,
    ModelConfig,
    MoeSpec,
)
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.latent_weights import latent_weights, prediction_weights
from jaxhybrid.models.text_model import text_model
from jaxhybrid.models.weight_table import LayerPlace, WeightTable, trunk_weights

MODEL_TYPES = ("kimi_linear",)


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    layer_count = read.take("num_hidden_layers")
    linear = read.nested("linear_attn_config")
    latent_layers = latent_layer_numbers(linear, layer_count)
    delta = delta_spec(linear)
    linear.finish()
    read.require("linear_num_heads", delta.num_heads)
    read.require("linear_head_dim", delta.head_dim)
    read.require("linear_conv_kernel_dim", delta.short_conv_kernel_size)
    latent = latent_spec(read)
    dense = DenseSpec(read.take("intermediate_size"))
    moe = moe_spec(read)
    first_dense = read.take("first_k_dense_replace", default=0)
    read.require("hidden_act", "silu")
    kinds = ["full_attention" if n in latent_layers else "linear_attention" for n in range(1, layer_count + 1)]
    read.require("layer_types", kinds)
    read.require("mlp_layer_types", ["dense"] * first_dense + ["sparse"] * (layer_count - first_dense))
    # Released files have rope keys, unused: every layer is without positions.
    read.rope().require("rope_type", "default")
    read.take("head_dim", default=None)

    def layer(number: int) -> LayerSpec:
        mixer: MixerSpec = latent if number in latent_layers else delta
        ffn: FfnSpec = dense if number <= first_dense else moe
        return LayerSpec(mixer, ffn)

    return text_model(
        read,
        model_type="kimi_linear",
        layers=tuple(layer(number) for number in range(1, layer_count + 1)),
        max_position_embeddings=read.take("model_max_length", "max_position_embeddings"),
        mtp_layers=(LayerSpec(latent, moe),) * read.take("num_nextn_predict_layers", default=0),
    )


def latent_layer_numbers(linear: ConfigReader, layer_count: int) -> set[int]:
    """The numbers, from 1, of the layers with latent attention; the others have KDA."""
    latent_layers = set(linear.take("full_attn_layers"))
    delta_layers = set(linear.take("kda_layers"))
    if latent_layers | delta_layers != set(range(1, layer_count + 1)) or latent_layers & delta_layers:
        raise linear.error(
            f"kda_layers and full_attn_layers must share out layers 1 to {layer_count}, "
            f"got {sorted(delta_layers)} and {sorted(latent_layers)}"
        )
    return latent_layers


def delta_spec(linear: ConfigReader) -> KimiDeltaSpec:
    """KDA's keys."""
    return KimiDeltaSpec(linear.take("num_heads"), linear.take("head_dim"), linear.take("short_conv_kernel_size"))


def latent_spec(read: ConfigReader) -> LatentAttentionSpec:
    """Latent attention's keys; it has no positions."""
    read.require("mla_use_nope", True)
    read.require("attention_bias", False)
    heads, nope_dim, rope_dim = (read.take(k) for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    read.require("qk_head_dim", nope_dim + rope_dim)
    read.require("num_key_value_heads", heads, default=heads)
    return LatentAttentionSpec(
        num_attention_heads=heads,
        q_lora_rank=read.take("q_lora_rank", default=None),
        kv_lora_rank=read.take("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=read.take("v_head_dim"),
        output_gate=read.take("mla_use_output_gate", default=False),
    )


def moe_spec(read: ConfigReader) -> MoeSpec:
    """Sigmoid-routed experts in every layer after the dense ones."""
    read.require("moe_layer_freq", 1)
    width = read.take("moe_intermediate_size")
    read.require("moe_router_activation_func", "sigmoid")
    read.require("use_grouped_topk", True, False)
    return MoeSpec(
        num_experts=read.take("num_experts", "num_local_experts"),
        num_experts_per_tok=read.take("num_experts_per_token", "num_experts_per_tok"),
        moe_intermediate_size=width,
        shared_intermediate_size=width * read.take("num_shared_experts", "n_shared_experts", default=0),
        shared_expert_gate=False,
        scoring="sigmoid",
        norm_topk_prob=read.take("moe_renormalize", "norm_topk_prob", default=True),
        routed_scaling_factor=read.take("routed_scaling_factor", default=1.0),
        n_group=read.take("num_expert_group", "n_group", default=None) or 1,
        topk_group=read.take("topk_group", default=None) or 1,
    )


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes."""
    trunk_weights(table, config)
    for number, place in enumerate(table.layers):
        _layer(place, f"model.layers.{number}")
    for number, place in enumerate(table.mtp):
        _layer(place, f"model.layers.{len(config.layers) + number}")
    prediction_weights(table, config)


def _layer(place: LayerPlace, prefix: str) -> None:
    place.norms(prefix)
    mixer = place.spec.mixer
    if isinstance(mixer, KimiDeltaSpec):
        delta_weights(place, f"{prefix}.self_attn", mixer)
        place.add(f"{prefix}.self_attn.A_log", "mixer", "A_log", shape=(1, 1, mixer.num_heads, 1))
    else:
        assert isinstance(mixer, LatentAttentionSpec)
        latent_weights(place, f"{prefix}.self_attn", mixer)
    if place.is_dense:
        place.dense(f"{prefix}.mlp", "ffn")
    else:
        moe_weights(place, f"{prefix}.block_sparse_moe")


def delta_weights(place: LayerPlace, prefix: str, spec: KimiDeltaSpec) -> None:
    """KDA's tensors but for A_log, whose shape the releases do not agree on."""
    width, taps = spec.num_heads * spec.head_dim, spec.short_conv_kernel_size
    for index, part in enumerate("qkv"):
        place.add(f"{prefix}.{part}_proj.weight", "mixer", "qkv_proj", "weight", index=(index,))
        conv_shape = (width, 1, taps)
        place.add(f"{prefix}.{part}_conv1d.weight", "mixer", "qkv_conv", index=(index,), shape=conv_shape)
    place.add(f"{prefix}.dt_bias", "mixer", "dt_bias")
    gate = ("g_proj",) if spec.full_rank_gate else ("g_a_proj", "g_b_proj")
    for part in ("f_a_proj", "f_b_proj", *gate, "b_proj", "o_norm", "o_proj"):
        place.add(f"{prefix}.{part}.weight", "mixer", part, "weight")


def moe_weights(place: LayerPlace, prefix: str) -> None:
    """Router, experts and shared expert."""
    assert isinstance(place.spec.ffn, MoeSpec)
    place.add(f"{prefix}.gate.weight", "ffn", "router", "weight")
    place.add(f"{prefix}.gate.e_score_correction_bias", "ffn", "e_score_correction_bias")
    place.experts(f"{prefix}.experts.{{expert}}.{{part}}.weight", gate="w1", up="w3", down="w2")
    if place.spec.ffn.shared_intermediate_size:
        place.dense(f"{prefix}.shared_experts", "ffn", "shared_expert")
