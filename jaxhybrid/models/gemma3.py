"""Gemma 3 (`gemma3_text`, and the text of `gemma3`): five layers with a window to one without. arXiv 2503.19786.

Of a checkpoint with images (`gemma3`) the language model is read; its vision tower is left alone.
"""

from dataclasses import replace

from jaxhybrid.config import ActivationSpec, AttentionSpec, DenseSpec, LayerSpec, ModelConfig, RopeSpec
from jaxhybrid.config_reader import ConfigReader, end_tokens
from jaxhybrid.models.rope_keys import rope_spec
from jaxhybrid.models.text_model import two_layer_types
from jaxhybrid.models.weight_table import WeightTable, trunk_weights

MODEL_TYPES = ("gemma3_text", "gemma3")

LOCAL, GLOBAL = "sliding_attention", "full_attention"


# Keys of `gemma3` that concern images.
IMAGE_KEYS = ("vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image")


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig; released files leave most keys to the defaults used here.

    Raises ConfigError naming the key that is missing or unsupported.
    """
    if "text_config" not in read and "vision_config" not in read:
        return _text_config(read)
    inner = read.nested("text_config")
    for key in IMAGE_KEYS:
        read.take(key, default=None)
    inner.require("model_type", "gemma3_text")
    inner.agree(read, "tie_word_embeddings")
    config = replace(_text_config(inner), model_type="gemma3")
    inner.finish()
    ends = end_tokens(read.take("eos_token_id", default=None))
    return replace(config, eos_token_ids=ends or config.eos_token_ids)


def _text_config(read: ConfigReader) -> ModelConfig:
    read.require("hidden_activation", "gelu_pytorch_tanh")
    read.require("attention_bias", False)
    read.require("attn_logit_softcapping", None)
    read.require("final_logit_softcapping", None)
    read.require("use_bidirectional_attention", False)
    hidden, count = read.take("hidden_size"), read.take("num_hidden_layers")
    positions = read.take("max_position_embeddings", default=131072)
    mixers = _mixers(read, positions)
    dense = DenseSpec(read.take("intermediate_size"), ActivationSpec("gelu_tanh"))
    return ModelConfig(
        model_type="gemma3_text",
        vocab_size=read.take("vocab_size", default=262208),
        hidden_size=hidden,
        layers=tuple(LayerSpec(mixers[kind], dense, post_norms=True) for kind in _layer_types(read, count)),
        rms_norm_eps=read.take("rms_norm_eps", default=1e-6),
        zero_centred_norms=True,
        tie_word_embeddings=read.take("tie_word_embeddings", default=True),
        max_position_embeddings=positions,
        bos_token_id=read.take("bos_token_id", default=2, nullable=True),
        eos_token_ids=end_tokens(read.take("eos_token_id", default=1, nullable=True)),
        embedding_scale=hidden**0.5,
    )


def _layer_types(read: ConfigReader, count: int) -> list[str]:
    pattern = read.take("sliding_window_pattern", "_sliding_window_pattern", default=6)
    default = [LOCAL if (number + 1) % pattern else GLOBAL for number in range(count)]
    return two_layer_types(read, default, (LOCAL, GLOBAL))


def _mixers(read: ConfigReader, positions: int) -> dict[str, AttentionSpec]:
    """The attention of each kind of layer; they differ in window and rope."""
    heads, kv_heads = read.take("num_attention_heads", default=8), read.take("num_key_value_heads", default=4)
    head_dim, window = read.take("head_dim", default=256), read.take("sliding_window", default=4096)
    scale = read.take("query_pre_attn_scalar", default=256) ** -0.5

    def attention(rope: RopeSpec, window: int | None) -> AttentionSpec:
        return AttentionSpec(
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            qk_norm=True,
            sliding_window=window,
            scale=scale,
        )

    ropes = _ropes(read, head_dim, positions)
    return {LOCAL: attention(ropes[LOCAL], window), GLOBAL: attention(ropes[GLOBAL], None)}


def _ropes(read: ConfigReader, head_dim: int, positions: int) -> dict[str, RopeSpec]:
    """`rope_parameters` by kind of layer, or the older keys, whose scaling is the global layers' alone."""
    keys = read.take("rope_parameters", default=None)
    if keys is None:
        scaling = read.take("rope_scaling", default=None) or {}
        keys = {
            GLOBAL: {"rope_theta": read.take("rope_theta", default=1e6), **scaling},
            LOCAL: {"rope_theta": read.take("rope_local_base_freq", default=1e4)},
        }
    of_kind = read.within("rope_parameters", keys)
    ropes = {
        kind: rope_spec(of_kind.within(kind, {"rope_parameters": of_kind.take(kind)}).rope(), head_dim, positions)
        for kind in (GLOBAL, LOCAL)
    }
    of_kind.finish()
    return ropes


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes."""
    root = ""
    if config.model_type == "gemma3":
        root = "language_model."
        table.ignore_all("vision_tower.")
        table.ignore_all("multi_modal_projector.")
    trunk_weights(table, config, f"{root}model.embed_tokens", f"{root}model.norm", f"{root}lm_head")
    for number, place in enumerate(table.layers):
        prefix = f"{root}model.layers.{number}"
        place.norms(prefix, ffn="pre_feedforward_layernorm")
        place.add(f"{prefix}.post_attention_layernorm.weight", "mixer_post_norm", "weight")
        place.add(f"{prefix}.post_feedforward_layernorm.weight", "ffn_post_norm", "weight")
        place.attention(f"{prefix}.self_attn")
        place.dense(f"{prefix}.mlp", "ffn")
