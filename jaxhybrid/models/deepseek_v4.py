"""DeepSeek-V4 (`deepseek_v4`): compressed attention, hyper-connections, experts by hash. arXiv 2606.19348."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxhybrid.config import (
    ActivationSpec,
    CompressedAttentionSpec,
    HyperConnections,
    IndexerSpec,
    LayerSpec,
    ModelConfig,
    MoeSpec,
    RopeSpec,
    YarnScaling,
)
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.rope_keys import rope_spec
from jaxhybrid.models.text_model import text_model
from jaxhybrid.models.weight_table import LayerPlace, WeightTable, trunk_weights

MODEL_TYPES = ("deepseek_v4",)

SPARSE_STRIDE = 4  # layers that compress so lightly have overlapping windows and an indexer
_LAYER_TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    strides = _strides(read, read.take("num_hidden_layers"))
    positions = read.take("max_position_embeddings")
    sliding, compressed, indexer = _attention(read, positions)
    mixers = {0: sliding} | {
        stride: replace(
            compressed,
            stride=stride,
            overlap=stride == SPARSE_STRIDE,
            indexer=indexer if stride == SPARSE_STRIDE else None,
        )
        for stride in set(strides) - {0}
    }
    moe = _moe_spec(read)
    hashed = _hashed_layers(read, len(strides))
    read.require("hidden_act", "silu")
    read.require("mlp_bias", False)
    read.take("router_jitter_noise", default=None)  # of training
    layers = (LayerSpec(mixers[stride], replace(moe, hashed=number < hashed)) for number, stride in enumerate(strides))
    return text_model(
        read,
        model_type="deepseek_v4",
        layers=tuple(layers),
        max_position_embeddings=positions,
        mtp_layers=(LayerSpec(sliding, moe),) * read.take("num_nextn_predict_layers", default=0),
        residual=HyperConnections(read.take("hc_mult"), read.take("hc_sinkhorn_iters"), read.take("hc_eps")),
    )


def _strides(read: ConfigReader, layers: int) -> list[int]:
    """Tokens to an entry in each layer, 0 for a window alone. Published lists go on with the prediction layer's."""
    if (kinds := read.take("layer_types", default=None)) is not None:
        rates = read.nested("compress_rates")
        if unknown := sorted(set(kinds) - set(_LAYER_TYPES)):
            raise read.error(f"layer_types: expected {', '.join(_LAYER_TYPES)}, got {', '.join(unknown)}")
        each = {"sliding_attention": 0} | {kind: rates.take(kind) for kind in _LAYER_TYPES[1:]}
        rates.finish()
        strides = [each[kind] for kind in kinds]
    else:
        strides = read.take("compress_ratios")
    if len(strides) < layers or any(strides[layers:]):
        raise read.error(f"compress_ratios: expected one for each of {layers} layers, then 0, got {strides}")
    return strides[:layers]


def _hashed_layers(read: ConfigReader, layers: int) -> int:
    """How many layers, from the first on, choose experts by a token's hash: said, or listed layer by layer."""
    kinds = read.take("mlp_layer_types", default=None)
    if kinds is None:
        return read.take("num_hash_layers")
    count = kinds.count("hash_moe")
    if kinds != ["hash_moe"] * count + ["moe"] * (layers - count):
        raise read.error(f"mlp_layer_types: expected hash_moe and then moe for {layers} layers, got {kinds}")
    read.require("num_hash_layers", count)
    return count


def _ropes(read: ConfigReader, head_dim: int, positions: int) -> tuple[RopeSpec, RopeSpec]:
    """Of the window, and of what is compressed: that alone is stretched, and without a factor on cos and sin."""
    rotary_dim, far_theta = read.take("qk_rope_head_dim"), read.take("compress_rope_theta")
    share = rotary_dim / head_dim
    read.require("partial_rotary_factor", share)
    keys = read.take("rope_parameters", default=None)
    if keys is None:
        near = {"rope_theta": read.take("rope_theta")}
        far = {**(read.take("rope_scaling", default=None) or {}), "rope_theta": far_theta}
    else:  # as transformers 5 writes them
        of_kind = read.within("rope_parameters", keys)
        near, far = of_kind.take("main"), of_kind.take("compress")
        of_kind.finish()
        read.require("rope_theta", near.get("rope_theta"))

    def spec(name: str, keys: Mapping[str, Any]) -> RopeSpec:
        rope = read.within(name, {"rope_parameters": keys}).rope()
        rope.require("partial_rotary_factor", share)
        return rope_spec(rope, rotary_dim, positions, interleaved=True)

    near_rope, far_rope = spec("rope of the window", near), spec("compressed rope", far)
    if near_rope.scaling is not None or far_rope.theta != far_theta:
        raise read.error(f"rope_parameters: expected main plain and compress with theta {far_theta}, got {keys!r}")
    if isinstance(far_rope.scaling, YarnScaling):
        far_rope = replace(far_rope, scaling=replace(far_rope.scaling, attention_factor=1.0))
    return near_rope, far_rope


def _attention(
    read: ConfigReader, positions: int
) -> tuple[CompressedAttentionSpec, CompressedAttentionSpec, IndexerSpec]:
    """The attention of layers with a window alone, that of the others but for their stride, and its indexer."""
    read.require("num_key_value_heads", 1)
    read.require("attention_bias", False)
    head_dim = read.take("head_dim")
    near, far = _ropes(read, head_dim, positions)
    sliding = CompressedAttentionSpec(
        num_attention_heads=read.take("num_attention_heads"),
        head_dim=head_dim,
        q_lora_rank=read.take("q_lora_rank"),
        rope=near,
        sliding_window=read.take("sliding_window"),
        o_groups=read.take("o_groups"),
        o_lora_rank=read.take("o_lora_rank"),
    )
    indexer = IndexerSpec(read.take("index_n_heads"), read.take("index_head_dim"), read.take("index_topk"), far)
    return sliding, replace(sliding, rope=far), indexer


def _moe_spec(read: ConfigReader) -> MoeSpec:
    width = read.take("moe_intermediate_size")
    read.require("scoring_func", "sqrtsoftplus")
    read.require("topk_method", "noaux_tc")
    read.require("norm_topk_prob", True)
    return MoeSpec(
        num_experts=read.take("n_routed_experts"),
        num_experts_per_tok=read.take("num_experts_per_tok"),
        moe_intermediate_size=width,
        shared_intermediate_size=width * read.take("n_shared_experts"),
        shared_expert_gate=False,
        scoring="sqrtsoftplus",
        norm_topk_prob=True,
        routed_scaling_factor=read.take("routed_scaling_factor"),
        activation=ActivationSpec("silu", limit=read.take("swiglu_limit")),
    )


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names, and where each goes."""
    trunk_weights(table, config, embedding="embed", norm="norm", head="head")
    for part in ("fn", "base", "scale"):
        table.add(f"hc_head_{part}", ("ends", "weights", part))
    for number, place in enumerate(table.layers):
        _layer(place, f"layers.{number}")
    for number, place in enumerate(table.mtp):
        prefix = f"mtp.{number}"
        _layer(place, prefix)
        for part in ("enorm", "hnorm", "e_proj", "h_proj", "norm"):
            table.add(f"{prefix}.{part}.weight", ("mtp", number, part, "weight"))
        for part in ("fn", "base", "scale"):
            table.add(f"{prefix}.hc_head_{part}", ("mtp", number, "ends", "weights", part))


def _layer(place: LayerPlace, prefix: str) -> None:
    place.norms(prefix, mixer="attn_norm", ffn="ffn_norm")
    for name, part in (("attn", "mixer_residual"), ("ffn", "ffn_residual")):
        for leaf in ("fn", "base", "scale"):
            place.add(f"{prefix}.hc_{name}_{leaf}", part, "weights", leaf)
    mixer, moe = place.spec.mixer, place.spec.ffn
    assert isinstance(mixer, CompressedAttentionSpec)
    assert isinstance(moe, MoeSpec)
    _attention_weights(place, f"{prefix}.attn", mixer)
    place.add(f"{prefix}.ffn.gate.weight", "ffn", "router", "weight")
    if moe.hashed:
        place.add(f"{prefix}.ffn.gate.tid2eid", "ffn", "tid2eid")
    else:
        place.add(f"{prefix}.ffn.gate.bias", "ffn", "e_score_correction_bias")
    place.experts(f"{prefix}.ffn.experts.{{expert}}.{{part}}.weight", gate="w1", up="w3", down="w2")
    shared = ("ffn", "shared_expert")
    for index, part in enumerate(("w1", "w3")):
        place.add(f"{prefix}.ffn.shared_experts.{part}.weight", *shared, "gate_up_proj", "weight", index=(index,))
    place.add(f"{prefix}.ffn.shared_experts.w2.weight", *shared, "down_proj", "weight")


def _attention_weights(place: LayerPlace, prefix: str, spec: CompressedAttentionSpec) -> None:
    names = (("wq_a", "q_a_proj"), ("q_norm", "q_a_norm"), ("wq_b", "q_b_proj"), ("wkv", "kv_proj"))
    for name, part in (*names, ("kv_norm", "kv_norm"), ("wo_b", "o_b_proj")):
        place.add(f"{prefix}.{name}.weight", "mixer", part, "weight")
    group_width = spec.num_attention_heads * spec.head_dim // spec.o_groups
    place.add(f"{prefix}.wo_a.weight", "mixer", "o_a_proj", shape=(spec.o_groups * spec.o_lora_rank, group_width))
    place.add(f"{prefix}.attn_sink", "mixer", "sinks")
    if spec.stride is not None:
        _compressor(place, f"{prefix}.compressor", "mixer", "compressor")
    if spec.indexer is not None:
        _compressor(place, f"{prefix}.indexer.compressor", "mixer", "indexer", "compressor")
        for part in ("wq_b", "weights_proj"):
            place.add(f"{prefix}.indexer.{part}.weight", "mixer", "indexer", part, "weight")


def _compressor(place: LayerPlace, prefix: str, *path: str) -> None:
    for part in ("wkv", "wgate", "norm"):
        place.add(f"{prefix}.{part}.weight", *path, part, "weight")
    place.add(f"{prefix}.ape", *path, "ape")
