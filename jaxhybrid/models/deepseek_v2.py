"""DeepSeek-V2 and V2-Lite (`deepseek_v2`): latent attention, mixture of experts. arXiv 2405.04434.

The families after it in the line share what their files say alike and their tensors' names.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from jaxhybrid.config import DenseSpec, LatentAttentionSpec, LayerSpec, ModelConfig, MoeSpec, YarnScaling
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.layers.rope import yarn_mscale
from jaxhybrid.models.latent_weights import latent_weights, prediction_weights
from jaxhybrid.models.rope_keys import rope_spec
from jaxhybrid.models.text_model import text_model
from jaxhybrid.models.weight_table import LayerPlace, WeightTable, trunk_weights

MODEL_TYPES = ("deepseek_v2",)


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    positions = read.take("max_position_embeddings")
    mixers = (latent_spec(read, positions),) * read.take("num_hidden_layers")
    read.require("scoring_func", "softmax")
    read.require("norm_topk_prob", False)
    moe = moe_spec(read, "softmax", norm_topk_prob=False)
    method = read.take("topk_method")
    if method == "greedy":
        moe = replace(moe, n_group=1, topk_group=1)
    elif method != "group_limited_greedy":
        raise read.error(f"topk_method={method!r} is not supported, expected 'greedy' or 'group_limited_greedy'")
    return model_config(read, "deepseek_v2", positions, mixers, moe)


def latent_spec(read: ConfigReader, positions: int) -> LatentAttentionSpec:
    """Latent attention, its rope part turned in neighbouring pairs and, under YaRN, its scores scaled up."""
    heads, rope_dim, nope_dim = (read.take(k) for k in ("num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim"))
    read.require("qk_head_dim", nope_dim + rope_dim)
    read.take("head_dim", default=None)  # of the rope part, or of the other, and said elsewhere
    read.require("rope_interleave", True)
    read.require("num_key_value_heads", heads)
    read.require("attention_bias", False)
    rope = rope_spec(read.rope(), rope_dim, positions, interleaved=True)
    stretch = 1.0
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        stretch = yarn_mscale(rope.scaling.factor, rope.scaling.mscale_all_dim)
    return LatentAttentionSpec(
        num_attention_heads=heads,
        q_lora_rank=read.take("q_lora_rank", nullable=True),
        kv_lora_rank=read.take("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=read.take("v_head_dim"),
        rope=rope,
        scale_factor=stretch**2,
    )


def moe_spec(read: ConfigReader, scoring: Literal["softmax", "sigmoid"], norm_topk_prob: bool) -> MoeSpec:
    """Routed and shared experts."""
    width = read.take("moe_intermediate_size")
    return MoeSpec(
        num_experts=read.take("n_routed_experts", "num_experts"),
        num_experts_per_tok=read.take("num_experts_per_tok"),
        moe_intermediate_size=width,
        shared_intermediate_size=width * read.take("n_shared_experts"),
        shared_expert_gate=False,
        scoring=scoring,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=read.take("routed_scaling_factor"),
        n_group=read.take("n_group", nullable=True) or 1,
        topk_group=read.take("topk_group", nullable=True) or 1,
    )


def model_config(
    read: ConfigReader, model_type: str, positions: int, mixers: Sequence[LatentAttentionSpec], moe: MoeSpec
) -> ModelConfig:
    """The whole model of one mixer a layer. The first layers' feed-forwards are dense; prediction layers are sparse."""
    dense, first_dense = DenseSpec(read.take("intermediate_size")), read.take("first_k_dense_replace")
    kinds = ["dense" if number < first_dense else "sparse" for number in range(len(mixers))]
    if (listed := read.take("mlp_layer_types", default=kinds)) != kinds:
        raise read.error(f"mlp_layer_types={listed!r} contradicts first_k_dense_replace={first_dense}")
    names = {"indexed_attention", "deepseek_sparse_attention"} if mixers[0].indexer else {"full_attention"}
    if unknown := set(read.take("layer_types", default=())) - names:
        raise read.error(f"layer_types: expected {' or '.join(sorted(names))}, got {', '.join(sorted(unknown))}")
    read.require("moe_layer_freq", 1)
    read.require("hidden_act", "silu")
    read.require("mlp_bias", False)
    return text_model(
        read,
        model_type=model_type,
        layers=tuple(LayerSpec(m, dense if number < first_dense else moe) for number, m in enumerate(mixers)),
        max_position_embeddings=positions,
        mtp_layers=(LayerSpec(mixers[0], moe),) * read.take("num_nextn_predict_layers", default=0),
    )


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names, and where each goes."""
    trunk_weights(table, config)
    for number, place in enumerate([*table.layers, *table.mtp]):
        _layer(place, f"model.layers.{number}")
    prediction_weights(table, config)


def _layer(place: LayerPlace, prefix: str) -> None:
    place.norms(prefix)
    assert isinstance(place.spec.mixer, LatentAttentionSpec)
    latent_weights(place, f"{prefix}.self_attn", place.spec.mixer)
    moe = place.spec.ffn
    if not isinstance(moe, MoeSpec):
        place.dense(f"{prefix}.mlp", "ffn")
        return
    place.add(f"{prefix}.mlp.gate.weight", "ffn", "router", "weight")
    if moe.scoring == "sigmoid":
        place.add(f"{prefix}.mlp.gate.e_score_correction_bias", "ffn", "e_score_correction_bias")
    place.experts(f"{prefix}.mlp.experts.{{expert}}.{{part}}_proj.weight", gate="gate", up="up", down="down")
    if moe.shared_intermediate_size:
        place.dense(f"{prefix}.mlp.shared_experts", "ffn", "shared_expert")
