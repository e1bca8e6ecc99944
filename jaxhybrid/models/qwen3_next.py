"""Qwen3-Next (`qwen3_next`): Gated DeltaNet and gated attention, mixture of experts with a gated shared expert.

Releases hold a prediction layer (`mtp.*`) that their config.json does not mention. It is loaded where the file is given
Qwen3.5's key for it, `mtp_num_hidden_layers: 1`, and passed over otherwise.
"""

import numpy as np
from jaxtyping import Int

from jaxhybrid.config import (
    AttentionSpec,
    DenseSpec,
    FfnSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MixerSpec,
    ModelConfig,
    MoeSpec,
)
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.rope_keys import rope_spec
from jaxhybrid.models.text_model import text_model, two_layer_types
from jaxhybrid.models.weight_table import LayerPlace, WeightTable, rows, trunk_weights

MODEL_TYPES = ("qwen3_next",)


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    types = layer_types(read)
    positions = read.take("max_position_embeddings")
    attention, delta = gated_attention_spec(read, positions), delta_spec(read)
    dense = DenseSpec(read.take("intermediate_size"))
    sparse: FfnSpec = moe_spec(read) or dense
    step, dense_layers = read.take("decoder_sparse_step", default=1), read.take("mlp_only_layers", default=[])
    read.require("hidden_act", "silu")

    def layer(number: int) -> LayerSpec:
        mixer: MixerSpec = attention if types[number] == "full_attention" else delta
        is_sparse = number not in dense_layers and (number + 1) % step == 0
        return LayerSpec(mixer, sparse if is_sparse else dense)

    return text_model(
        read,
        model_type="qwen3_next",
        layers=tuple(layer(number) for number in range(len(types))),
        zero_centred_norms=True,
        max_position_embeddings=positions,
        mtp_layers=prediction_layers(read, LayerSpec(attention, sparse)),
    )


def prediction_layers(read: ConfigReader, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """As many as the config says: none or one."""
    read.require("mtp_use_dedicated_embeddings", False)
    count = read.take("mtp_num_hidden_layers", default=0)
    if count > 1:
        raise read.error(f"mtp_num_hidden_layers={count} is not supported, expected 0 or 1")
    return (layer,) * count


def layer_types(read: ConfigReader) -> list[str]:
    """`linear_attention` or `full_attention` for every layer, spelt out or by the interval."""
    layer_count = read.take("num_hidden_layers")
    interval = read.take("full_attention_interval", default=4)
    kinds = "linear_attention", "full_attention"
    return two_layer_types(read, [kinds[(number + 1) % interval == 0] for number in range(layer_count)], kinds)


def gated_attention_spec(read: ConfigReader, positions: int) -> AttentionSpec:
    """Attention with norms on q and k, an output gate, and a quarter of each head rotated."""
    head_dim = read.take("head_dim")
    read.require("attention_bias", False)
    read.require("use_sliding_window", False)
    read.take("sliding_window", default=None)
    return AttentionSpec(
        num_attention_heads=read.take("num_attention_heads"),
        num_key_value_heads=read.take("num_key_value_heads"),
        head_dim=head_dim,
        rope=rope_spec(read.rope(), head_dim, positions, partial=0.25),
        qk_norm=True,
        output_gate=True,
    )


def delta_spec(read: ConfigReader) -> GatedDeltaNetSpec:
    """Gated DeltaNet's keys."""
    return GatedDeltaNetSpec(
        num_key_heads=read.take("linear_num_key_heads"),
        num_value_heads=read.take("linear_num_value_heads"),
        key_head_dim=read.take("linear_key_head_dim"),
        value_head_dim=read.take("linear_value_head_dim"),
        conv_kernel_size=read.take("linear_conv_kernel_dim"),
    )


def moe_spec(read: ConfigReader) -> MoeSpec | None:
    """Softmax-routed experts and a gated shared one; None where there are no experts."""
    experts, chosen = read.take("num_experts"), read.take("num_experts_per_tok")
    width, shared = read.take("moe_intermediate_size"), read.take("shared_expert_intermediate_size")
    normalised = read.take("norm_topk_prob", default=True)
    return MoeSpec(experts, chosen, width, shared, True, "softmax", normalised) if experts else None


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes."""
    trunk_weights(table, config)
    places = [(f"model.layers.{number}", place) for number, place in enumerate(table.layers)]
    for prefix, place in [*places, *((f"mtp.layers.{number}", place) for number, place in enumerate(table.mtp))]:
        place.norms(prefix)
        mixer = place.spec.mixer
        if isinstance(mixer, GatedDeltaNetSpec):
            _delta(place, f"{prefix}.linear_attn", mixer)
        else:
            gated_attention_weights(place, f"{prefix}.self_attn")
        if place.is_dense:
            place.dense(f"{prefix}.mlp", "ffn")
        else:
            moe_weights(place, f"{prefix}.mlp")
    prediction_weights(table, config)


def prediction_weights(table: WeightTable, config: ModelConfig) -> None:
    """What a prediction layer has beside the tensors of any layer."""
    for number in range(len(config.mtp_layers)):
        for name, part in (
            ("pre_fc_norm_embedding", "enorm"),
            ("pre_fc_norm_hidden", "hnorm"),
            ("fc", "eh_proj"),
            ("norm", "norm"),
        ):
            table.add(f"mtp.{name}.weight", ("mtp", number, part, "weight"))
    if not config.mtp_layers:
        # Qwen3-Next's releases hold a prediction layer of which their config.json says nothing.
        table.ignore_all("mtp.")


def _delta(place: LayerPlace, prefix: str, spec: GatedDeltaNetSpec) -> None:
    """The file packs, per key head, [q | k | v of its value heads | z of its value heads] and [b | a]."""
    groups, ratio = spec.num_key_heads, spec.num_value_heads // spec.num_key_heads
    key, value = spec.key_head_dim, ratio * spec.value_head_dim
    packed = np.arange(groups * (2 * key + 2 * value)).reshape(groups, -1)
    q, k, v, z = np.split(packed, [key, 2 * key, 2 * key + value], axis=1)
    b, a = np.split(np.arange(groups * 2 * ratio).reshape(groups, -1), 2, axis=1)
    for name, size, parts in (
        ("in_proj_qkvz", packed.size, {"in_proj_qkv": (q, k, v), "in_proj_z": (z,)}),
        ("in_proj_ba", groups * 2 * ratio, {"in_proj_b": (b,), "in_proj_a": (a,)}),
    ):
        for part, chosen in parts.items():
            order = np.concatenate(chosen, axis=1).ravel()
            place.add(
                f"{prefix}.{name}.weight", "mixer", part, "weight", convert=rows(order), shape=(size, place.hidden)
            )
    delta_weights(place, prefix, spec)


def delta_weights(place: LayerPlace, prefix: str, spec: GatedDeltaNetSpec) -> None:
    """Gated DeltaNet's tensors but for its projections of the input."""
    conv_shape = (spec.conv_dim, 1, spec.conv_kernel_size)
    place.add(f"{prefix}.conv1d.weight", "mixer", "conv", shape=conv_shape, convert=rows(by_key_head(spec)))
    place.add(f"{prefix}.A_log", "mixer", "A_log")
    place.add(f"{prefix}.dt_bias", "mixer", "dt_bias")
    place.add(f"{prefix}.norm.weight", "mixer", "norm", "weight")
    place.add(f"{prefix}.out_proj.weight", "mixer", "out_proj", "weight")


def by_key_head(spec: GatedDeltaNetSpec) -> Int[np.ndarray, " channels"]:
    """Channels [all q | all k | all v], as published, in the layer's order: per key head [q | k | v]."""
    key_width = spec.num_key_heads * spec.key_head_dim
    parts = np.split(np.arange(spec.conv_dim), [key_width, 2 * key_width])
    return np.concatenate([part.reshape(spec.num_key_heads, -1) for part in parts], axis=1).ravel()


def gated_attention_weights(place: LayerPlace, prefix: str) -> None:
    """q_proj holds, head by head, the query rows and then the output gate's."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        place.add(f"{prefix}.{name}.weight", "mixer", name, "weight")


def moe_weights(place: LayerPlace, prefix: str) -> None:
    """A tensor for each of an expert's matrices; router and shared expert."""
    place.experts(f"{prefix}.experts.{{expert}}.{{part}}_proj.weight", gate="gate", up="up", down="down")
    shared_weights(place, prefix)


def shared_weights(place: LayerPlace, prefix: str) -> None:
    """Of a mixture of experts, what is not the routed experts."""
    place.add(f"{prefix}.gate.weight", "ffn", "router", "weight")
    place.dense(f"{prefix}.shared_expert", "ffn", "shared_expert")
    place.add(f"{prefix}.shared_expert_gate.weight", "ffn", "shared_expert_gate", "weight")
