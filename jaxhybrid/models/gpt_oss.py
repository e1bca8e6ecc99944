"""gpt-oss (`gpt_oss`): every other layer has a window, heads have sinks, experts clamped SwiGLU. arXiv 2508.10925."""

from collections.abc import Callable
from functools import partial

import numpy as np

from jaxhybrid.config import ActivationSpec, AttentionSpec, LayerSpec, ModelConfig, MoeSpec
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.rope_keys import rope_spec
from jaxhybrid.models.text_model import text_model, two_layer_types
from jaxhybrid.models.weight_table import LayerPlace, WeightTable, trunk_weights

MODEL_TYPES = ("gpt_oss",)

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    read.require("hidden_act", "silu")
    read.require("swiglu_alpha", 1.702)
    read.take("initial_context_length", default=None)  # the rope's original_max_position_embeddings again
    count, positions = read.take("num_hidden_layers"), read.take("max_position_embeddings", default=131072)
    default = [GLOBAL if number % 2 else LOCAL for number in range(count)]
    types = two_layer_types(read, default, (LOCAL, GLOBAL))
    window = read.take("sliding_window")
    attention = _attention(read, positions)
    moe = MoeSpec(
        num_experts=read.take("num_local_experts"),
        num_experts_per_tok=read.take("num_experts_per_tok", "experts_per_token"),
        moe_intermediate_size=read.take("intermediate_size"),
        shared_intermediate_size=0,
        shared_expert_gate=False,
        scoring="softmax",
        norm_topk_prob=True,  # a softmax over the chosen
        activation=ActivationSpec("gpt_oss", limit=read.take("swiglu_limit", default=7.0)),
        biases=True,
    )
    mixers = {LOCAL: attention(window), GLOBAL: attention(None)}
    return text_model(
        read,
        model_type="gpt_oss",
        layers=tuple(LayerSpec(mixers[kind], moe) for kind in types),
        max_position_embeddings=positions,
    )


def _attention(read: ConfigReader, positions: int) -> Callable[[int | None], AttentionSpec]:
    """The attention with a given window."""
    heads, kv_heads = read.take("num_attention_heads"), read.take("num_key_value_heads")
    head_dim, bias = read.take("head_dim"), read.take("attention_bias", default=True)
    rope = rope_spec(read.rope(), head_dim, positions)
    return lambda window: AttentionSpec(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        sliding_window=window,
        sinks=True,
    )


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release (as it is unquantised), and where each goes."""
    trunk_weights(table, config)
    for number, place in enumerate(table.layers):
        prefix = f"model.layers.{number}"
        place.norms(prefix)
        place.attention(f"{prefix}.self_attn")
        place.add(f"{prefix}.mlp.router.weight", "ffn", "router", "weight")
        place.add(f"{prefix}.mlp.router.bias", "ffn", "router", "bias")
        _experts(place, f"{prefix}.mlp.experts")


def _experts(place: LayerPlace, prefix: str) -> None:
    """gate_up_proj [E, D, 2 I] and its bias [E, 2 I] alternate gate and up; down_proj is [E, I, D]."""
    moe = place.spec.ffn
    assert isinstance(moe, MoeSpec)
    experts, inner, hidden = moe.num_experts, moe.moe_intermediate_size, place.hidden
    for part, columns in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
        for expert in range(experts):
            place.expert(
                f"{prefix}.gate_up_proj", f"{part}_proj", expert,
                shape=(experts, hidden, 2 * inner), convert=_matrix(expert, columns),
            )  # fmt: skip
        place.add(
            f"{prefix}.gate_up_proj_bias", "ffn", f"{part}_bias",
            shape=(experts, 2 * inner), convert=partial(_columns, columns),
        )  # fmt: skip
    for expert in range(experts):
        place.expert(
            f"{prefix}.down_proj", "down_proj", expert,
            shape=(experts, inner, hidden), convert=_matrix(expert, slice(None)),
        )  # fmt: skip
    place.add(f"{prefix}.down_proj_bias", "ffn", "down_bias")


def _columns(columns: slice, bias: np.ndarray) -> np.ndarray:
    return bias[:, columns]


def _matrix(expert: int, columns: slice) -> Callable[[np.ndarray], np.ndarray]:
    """One expert's matrix of a stack [E, in, out], as [out, in]."""
    return lambda stack: stack[expert, :, columns].T
