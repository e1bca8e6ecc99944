"""Kimi K3 (`kimi_k3`): KDA with bounded decay, gated MLA, latent experts, attention residuals, and a vision tower.

arXiv 2607.24653. The released file holds the text part under `text_config` and `language_model.`, beside a tower for
images (models/moon_vision.py).
"""

from dataclasses import replace

from jaxhybrid.config import (
    ActivationSpec,
    AttentionResidual,
    DenseSpec,
    KimiDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelConfig,
    MoeSpec,
)
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.kimi_linear import (
    delta_spec,
    delta_weights,
    latent_layer_numbers,
    latent_spec,
    moe_spec,
    moe_weights,
)
from jaxhybrid.models.latent_weights import latent_weights
from jaxhybrid.models.moon_vision import vision_spec, vision_weights
from jaxhybrid.models.text_model import text_model
from jaxhybrid.models.weight_table import LayerPlace, WeightTable, rows, trunk_weights

MODEL_TYPES = ("kimi_k3",)


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    text = read.nested("text_config")
    read.take("image_placeholder", default=None)  # what the chat format writes for an image before it is expanded
    text.take("model_type", default=None)
    for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id"):
        text.agree(read, name)
    config = _text(text)
    text.finish()
    if "vision_config" not in read:  # the text part alone, as some conversions keep it
        read.take("media_placeholder_token_id", default=None)
        return config
    return replace(config, vision=vision_spec(read, config.hidden_size))


def _text(read: ConfigReader) -> ModelConfig:
    layer_count = read.take("num_hidden_layers")
    linear = read.nested("linear_attn_config")
    latent_layers = latent_layer_numbers(linear, layer_count)
    delta = replace(
        delta_spec(linear),
        gate_lower_bound=linear.take("gate_lower_bound", default=None),
        full_rank_gate=linear.take("use_full_rank_gate", default=False),
    )
    linear.finish()
    latent, act = latent_spec(read), _activation(read)
    dense = DenseSpec(read.take("intermediate_size"), act)
    moe = replace(
        moe_spec(read),
        activation=act,
        latent_size=read.take("routed_expert_hidden_size", default=None),
        latent_norm=read.take("latent_moe_use_norm", default=False),
    )
    first_dense = read.take("first_k_dense_replace", default=0)
    block = read.take("attn_res_block_size")
    read.require("topk_method", "noaux_tc")
    read.require("num_nextn_predict_layers", 0)
    read.rope().require("rope_type", "default")  # unused: every layer is without positions
    read.take("head_dim", default=None)

    def layer(index: int) -> LayerSpec:
        mixer = latent if index + 1 in latent_layers else delta
        return LayerSpec(mixer, dense if index < first_dense else moe, seals_block=index % block == 0)

    return text_model(
        read,
        model_type="kimi_k3",
        layers=tuple(layer(index) for index in range(layer_count)),
        max_position_embeddings=read.take("model_max_length", "max_position_embeddings"),
        residual=AttentionResidual(),
    )


def _activation(read: ConfigReader) -> ActivationSpec:
    read.require("hidden_act", "situ")
    return ActivationSpec(
        "situ",
        beta=float(read.take("activation_situ_beta")),
        linear_beta=read.take("activation_situ_linear_beta", default=None),
    )


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes; checkpoint/dequantise.py reads its MXFP4."""
    model = "language_model.model"
    trunk_weights(table, config, f"{model}.embed_tokens", f"{model}.norm", "language_model.lm_head")
    for part in ("norm", "proj"):
        table.add(f"{model}.output_attn_res_{part}.weight", ("ends", "mixture", part, "weight"))
    for number, place in enumerate(table.layers):
        _layer(place, f"{model}.layers.{number}")
    if config.vision is not None:
        vision_weights(table, config.vision)


def _layer(place: LayerPlace, prefix: str) -> None:
    place.norms(prefix)
    for residual, name in (("mixer_residual", "self_attention_res"), ("ffn_residual", "mlp_res")):
        for part in ("norm", "proj"):
            place.add(f"{prefix}.{name}_{part}.weight", residual, "mixture", part, "weight")
    mixer, ffn = place.spec.mixer, place.spec.ffn
    if isinstance(mixer, KimiDeltaSpec):
        delta_weights(place, f"{prefix}.self_attn", mixer)
        # One rate a head, with zeros up to head_dim behind them.
        used = rows(slice(mixer.num_heads))
        place.add(f"{prefix}.self_attn.A_log", "mixer", "A_log", shape=(mixer.head_dim,), convert=used)
    else:
        assert isinstance(mixer, LatentAttentionSpec)
        latent_weights(place, f"{prefix}.self_attn", mixer)
    if place.is_dense:
        place.dense(f"{prefix}.mlp", "ffn")
        return
    moe_weights(place, f"{prefix}.block_sparse_moe")
    assert isinstance(ffn, MoeSpec)
    if ffn.latent_size is not None:
        for name, part in (("down_proj", "fc1_latent_proj"), ("up_proj", "fc2_latent_proj")):
            place.add(f"{prefix}.block_sparse_moe.routed_expert_{name}.weight", "ffn", part, "weight")
    if ffn.latent_norm:
        place.add(f"{prefix}.block_sparse_moe.routed_expert_norm.weight", "ffn", "latent_norm", "weight")
