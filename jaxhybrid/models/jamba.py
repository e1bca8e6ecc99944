"""Jamba (`jamba`): Mamba-1, attention without positions, and a mixture of experts in some layers. arXiv 2403.19887."""

import math
from collections.abc import Callable

import numpy as np

from jaxhybrid.config import AttentionSpec, DenseSpec, FfnSpec, LayerSpec, Mamba1Spec, MixerSpec, ModelConfig, MoeSpec
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.text_model import text_model
from jaxhybrid.models.weight_table import LayerPlace, WeightTable, trunk_weights

MODEL_TYPES = ("jamba",)


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    hidden, layer_count = read.take("hidden_size"), read.take("num_hidden_layers")
    read.require("hidden_act", "silu")
    read.require("sliding_window", None)
    attention, mamba = _attention_spec(read, hidden), _mamba_spec(read, hidden)
    dense, moe = _feed_forward_specs(read)
    has_attention = _schedule(read, "attn_layer")
    has_experts = _schedule(read, "expert_layer")

    def layer(number: int) -> LayerSpec:
        mixer: MixerSpec = attention if has_attention(number) else mamba
        ffn: FfnSpec = moe if moe is not None and has_experts(number) else dense
        return LayerSpec(mixer, ffn)

    return text_model(
        read,
        model_type="jamba",
        hidden_size=hidden,
        layers=tuple(layer(number) for number in range(layer_count)),
        max_position_embeddings=read.take("max_position_embeddings"),
    )


def _schedule(read: ConfigReader, name: str) -> Callable[[int], bool]:
    """Which layers, from 0, have what `{name}_period` and `{name}_offset` describe: one in every period."""
    period, offset = read.take(f"{name}_period"), read.take(f"{name}_offset")
    if not 0 <= offset < period:
        raise read.error(f"{name}_offset={offset} must lie between 0 and {name}_period={period}")
    return lambda number: number % period == offset


def _attention_spec(read: ConfigReader, hidden: int) -> AttentionSpec:
    heads = read.take("num_attention_heads")
    return AttentionSpec(heads, read.take("num_key_value_heads"), head_dim=hidden // heads, rope=None)


def _mamba_spec(read: ConfigReader, hidden: int) -> Mamba1Spec:
    rank = read.take("mamba_dt_rank", default="auto")
    return Mamba1Spec(
        intermediate_size=read.take("mamba_expand") * hidden,
        state_size=read.take("mamba_d_state"),
        conv_kernel_size=read.take("mamba_d_conv"),
        dt_rank=math.ceil(hidden / 16) if rank == "auto" else rank,
        conv_bias=read.take("mamba_conv_bias", default=True),
        proj_bias=read.take("mamba_proj_bias", default=False),
    )


def _feed_forward_specs(read: ConfigReader) -> tuple[DenseSpec, MoeSpec | None]:
    """Experts are as wide as a dense feed-forward; a single expert is one."""
    width, experts, chosen = (read.take(name) for name in ("intermediate_size", "num_experts", "num_experts_per_tok"))
    dense = DenseSpec(width)
    if experts == 1:
        return dense, None
    moe = MoeSpec(
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=width,
        shared_intermediate_size=0,
        shared_expert_gate=False,
        scoring="softmax",
        norm_topk_prob=False,
    )
    return dense, moe


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes."""
    trunk_weights(table, config, norm="model.final_layernorm")
    for number, place in enumerate(table.layers):
        prefix = f"model.layers.{number}"
        place.norms(prefix, ffn="pre_ff_layernorm")
        if isinstance(place.spec.mixer, Mamba1Spec):
            _mamba(place, f"{prefix}.mamba", place.spec.mixer)
        else:
            place.attention(f"{prefix}.self_attn")
        if place.is_dense:
            place.dense(f"{prefix}.feed_forward", "ffn")
        else:
            place.add(f"{prefix}.feed_forward.router.weight", "ffn", "router", "weight")
            experts = f"{prefix}.feed_forward.experts.{{expert}}.{{part}}.weight"
            place.experts(experts, gate="gate_proj", up="up_proj", down="down_proj")


def _mamba(place: LayerPlace, prefix: str, spec: Mamba1Spec) -> None:
    for name in ("x_proj", "dt_proj", "out_proj", "dt_layernorm", "b_layernorm", "c_layernorm"):
        place.add(f"{prefix}.{name}.weight", "mixer", name, "weight")
    both = 2 * spec.intermediate_size  # x, then z
    place.add(f"{prefix}.in_proj.weight", "mixer", "in_proj", "weight", shape=(both, place.hidden))
    if spec.proj_bias:
        place.add(f"{prefix}.in_proj.bias", "mixer", "in_proj", "bias", shape=(both,))
        place.add(f"{prefix}.out_proj.bias", "mixer", "out_proj", "bias")
    place.add(f"{prefix}.dt_proj.bias", "mixer", "dt_bias")
    place.add(f"{prefix}.conv1d.weight", "mixer", "conv", shape=(spec.intermediate_size, 1, spec.conv_kernel_size))
    if spec.conv_bias:
        place.add(f"{prefix}.conv1d.bias", "mixer", "conv_bias")
    place.add(f"{prefix}.D", "mixer", "D")
    rates = (spec.intermediate_size, spec.state_size)
    place.add(f"{prefix}.A_log", "mixer", "A_log", shape=rates, convert=np.transpose)
