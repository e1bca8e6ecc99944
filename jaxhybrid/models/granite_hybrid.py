"""Granite 4 hybrid (`granitemoehybrid`): Mamba-2 and attention, a mixture of experts beside a shared one, or dense.

Its four multipliers are the embedding's scale, attention's, the residual's and the inverse of the logits'.
"""

from jaxhybrid.config import (
    AttentionSpec,
    DenseSpec,
    FfnSpec,
    LayerSpec,
    Mamba2Spec,
    MixerSpec,
    ModelConfig,
    MoeSpec,
    PlainResidual,
)
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.mamba2_keys import mamba2_spec, mamba2_weights
from jaxhybrid.models.rope_keys import rope_spec
from jaxhybrid.models.text_model import text_model
from jaxhybrid.models.weight_table import Convert, LayerPlace, WeightTable, rows, trunk_weights

MODEL_TYPES = ("granitemoehybrid",)

MIXERS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    hidden = read.take("hidden_size")
    positions = read.take("max_position_embeddings")
    names = read.take("layer_types", "layers_block_type")
    if set(names) - set(MIXERS):
        raise read.error(f"layer_types: unknown {sorted(set(names) - set(MIXERS))}, expected {sorted(MIXERS)}")
    read.require("num_hidden_layers", len(names))
    read.require("hidden_act", "silu")
    read.require("normalization_function", "rmsnorm")
    read.take("init_method", default=None)  # of training
    ffn = _feed_forward_spec(read)
    mixers: dict[str, MixerSpec] = {
        "attention": _attention_spec(read, hidden, positions),
        "mamba": mamba2_spec(read, read.take("mamba_expand") * hidden),
    }
    return text_model(
        read,
        model_type="granitemoehybrid",
        hidden_size=hidden,
        layers=tuple(LayerSpec(mixers[MIXERS[name]], ffn) for name in names),
        max_position_embeddings=positions,
        embedding_scale=float(read.take("embedding_multiplier", default=1.0)),
        logit_scale=1.0 / read.take("logits_scaling", default=1.0),
        residual=PlainResidual(float(read.take("residual_multiplier", default=1.0))),
    )


def _attention_spec(read: ConfigReader, hidden: int, positions: int) -> AttentionSpec:
    heads, bias = read.take("num_attention_heads"), read.take("attention_bias", default=False)
    position_kind = read.take("position_embedding_type", default=None)
    if position_kind not in (None, "nope", "rope"):
        raise read.error(f"position_embedding_type={position_kind!r} is not supported, expected 'rope', 'nope' or null")
    rope = rope_spec(read.rope(), hidden // heads, positions, theta=10000.0)
    return AttentionSpec(
        num_attention_heads=heads,
        num_key_value_heads=read.take("num_key_value_heads", default=None) or heads,
        head_dim=hidden // heads,
        rope=rope if position_kind == "rope" else None,
        qkv_bias=bias,
        o_bias=bias,
        scale=float(read.take("attention_multiplier", default=1.0)),
    )


def _feed_forward_spec(read: ConfigReader) -> FfnSpec:
    shared, experts = read.take("shared_intermediate_size"), read.take("num_local_experts")
    chosen, width = read.take("num_experts_per_tok"), read.take("intermediate_size")
    if experts == 0:
        return DenseSpec(shared)
    return MoeSpec(
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=width,
        shared_intermediate_size=shared,
        shared_expert_gate=False,
        scoring="softmax",
        norm_topk_prob=True,
    )


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes."""
    trunk_weights(table, config)
    for number, place in enumerate(table.layers):
        prefix = f"model.layers.{number}"
        place.norms(prefix)
        if isinstance(place.spec.mixer, Mamba2Spec):
            mamba2_weights(place, f"{prefix}.mamba", place.spec.mixer, "mixer")
        else:
            place.attention(f"{prefix}.self_attn")
        ffn = place.spec.ffn
        if isinstance(ffn, MoeSpec):
            _experts(place, f"{prefix}.block_sparse_moe", ffn)
            _shared(place, f"{prefix}.shared_mlp", ffn.shared_intermediate_size, "ffn", "shared_expert")
        else:
            assert isinstance(ffn, DenseSpec)
            _shared(place, f"{prefix}.shared_mlp", ffn.intermediate_size, "ffn")


def _shared(place: LayerPlace, prefix: str, width: int, *path: str) -> None:
    """A feed-forward whose gate and up projections are the halves of one tensor."""
    for part in range(2):
        half = rows(slice(part * width, (part + 1) * width))
        place.add(
            f"{prefix}.input_linear.weight", *path, "gate_up_proj", "weight", index=(part,),
            shape=(2 * width, place.hidden), convert=half,
        )  # fmt: skip
    place.add(f"{prefix}.output_linear.weight", *path, "down_proj", "weight")


def _experts(place: LayerPlace, prefix: str, spec: MoeSpec) -> None:
    """Experts come stacked: [E, gate rows then up rows, D] and [E, D, I]."""
    place.add(f"{prefix}.router.layer.weight", "ffn", "router", "weight")
    count, width = spec.num_experts, spec.moe_intermediate_size
    gate_up, down = f"{prefix}.input_linear.weight", f"{prefix}.output_linear.weight"
    for expert in range(count):
        for part, matrix in enumerate(("gate_proj", "up_proj")):
            half = _of_expert(expert, slice(part * width, (part + 1) * width))
            place.expert(gate_up, matrix, expert, (count, 2 * width, place.hidden), half)
        place.expert(down, "down_proj", expert, (count, place.hidden, width), _of_expert(expert, slice(None)))


def _of_expert(expert: int, rows: slice) -> Convert:
    return lambda tensor: tensor[expert, rows]
