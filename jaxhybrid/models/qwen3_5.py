"""Qwen3.5, dense and mixture of experts: Gated DeltaNet and gated attention, a prediction layer, images and video.

Released checkpoints are the whole model (`qwen3_5`, `qwen3_5_moe`), with its text part under `text_config` and a vision
tower (models/qwen_vision.py); `qwen3_5_text` and `qwen3_5_moe_text` are the text part alone.
"""

from jaxhybrid.config import (
    DenseSpec,
    FfnSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MixerSpec,
    ModelConfig,
    MoeSpec,
)
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.qwen3_next import (
    by_key_head,
    delta_spec,
    delta_weights,
    gated_attention_spec,
    gated_attention_weights,
    layer_types,
    moe_spec,
    moe_weights,
    prediction_layers,
    prediction_weights,
    shared_weights,
)
from jaxhybrid.models.qwen_vision import vision_spec, vision_weights
from jaxhybrid.models.text_model import text_model
from jaxhybrid.models.weight_table import Convert, LayerPlace, WeightTable, rows, trunk_weights
from jaxhybrid.vision_spec import VisionSpec

MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    if "text_config" not in read and "vision_config" not in read:
        return _text(read, None)
    text, vision = read.nested("text_config"), vision_spec(read)
    text.take("model_type", default=None)
    read.require("language_model_only", False)
    for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id"):
        text.agree(read, name)
    config = _text(text, vision)
    text.finish()
    return config


def _text(read: ConfigReader, vision: VisionSpec | None) -> ModelConfig:
    types = layer_types(read)
    positions = read.take("max_position_embeddings")
    attention, delta = gated_attention_spec(read, positions), delta_spec(read)
    is_moe = "num_experts" in read or "moe_intermediate_size" in read
    sparse = moe_spec(read) if is_moe else None
    ffn: FfnSpec = sparse or DenseSpec(read.take("intermediate_size"))
    if is_moe:
        read.take("intermediate_size", default=None)  # of dense layers, which a mixture of experts has none of
    read.require("mlp_only_layers", [])
    read.require("attn_output_gate", True)
    read.require("output_gate_type", "swish", "silu")  # of the delta rule; attention's is a sigmoid
    read.require("hidden_act", "silu")
    read.require("mamba_ssm_dtype", "float32")
    mixers: dict[str, MixerSpec] = {"full_attention": attention, "linear_attention": delta}
    return text_model(
        read,
        model_type="qwen3_5" + ("_moe" if is_moe else "") + ("_text" if vision is None else ""),
        layers=tuple(LayerSpec(mixers[kind], ffn) for kind in types),
        zero_centred_norms=True,
        max_position_embeddings=positions,
        mtp_layers=prediction_layers(read, LayerSpec(attention, ffn)),
        vision=vision,
    )


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes."""
    trunk = "model" if config.vision is None else "model.language_model"
    trunk_weights(table, config, embedding=f"{trunk}.embed_tokens", norm=f"{trunk}.norm")
    for number, place in enumerate(table.layers):
        prefix = f"{trunk}.layers.{number}"
        _layer(place, prefix)
        if not place.is_dense:
            _fused_experts(place, f"{prefix}.mlp.experts")
            shared_weights(place, f"{prefix}.mlp")
    for number, place in enumerate(table.mtp):
        _layer(place, f"mtp.layers.{number}")
        if not place.is_dense:
            moe_weights(place, f"mtp.layers.{number}.mlp")
    prediction_weights(table, config)
    if config.vision is not None:
        vision_weights(table, config.vision, "model.visual")


def _layer(place: LayerPlace, prefix: str) -> None:
    """A layer but for its experts, which the trunk and the prediction layer keep in different ways."""
    place.norms(prefix)
    mixer = place.spec.mixer
    if isinstance(mixer, GatedDeltaNetSpec):
        place.add(
            f"{prefix}.linear_attn.in_proj_qkv.weight", "mixer", "in_proj_qkv", "weight",
            convert=rows(by_key_head(mixer)), shape=(mixer.conv_dim, place.hidden),
        )  # fmt: skip
        for part in ("in_proj_z", "in_proj_b", "in_proj_a"):
            place.add(f"{prefix}.linear_attn.{part}.weight", "mixer", part, "weight")
        delta_weights(place, f"{prefix}.linear_attn", mixer)
    else:
        gated_attention_weights(place, f"{prefix}.self_attn")
    if place.is_dense:
        place.dense(f"{prefix}.mlp", "ffn")


def _fused_experts(place: LayerPlace, prefix: str) -> None:
    """One tensor [E, 2 I, D] of all gates above all ups of an expert, and one [E, D, I]."""
    spec = place.spec.ffn
    assert isinstance(spec, MoeSpec)
    count, width, hidden = spec.num_experts, spec.moe_intermediate_size, place.hidden

    def part(expert: int, chosen: slice) -> Convert:
        return lambda tensor: tensor[expert, chosen]

    for expert in range(count):
        for matrix, chosen in (("gate_proj", slice(width)), ("up_proj", slice(width, None))):
            place.expert(f"{prefix}.gate_up_proj", matrix, expert, (count, 2 * width, hidden), part(expert, chosen))
        place.expert(f"{prefix}.down_proj", "down_proj", expert, (count, hidden, width), part(expert, slice(None)))
