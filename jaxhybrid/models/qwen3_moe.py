"""Qwen3-MoE (`qwen3_moe`): grouped-query attention and a mixture of experts without a shared one. arXiv 2505.09388."""

from jaxhybrid.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, MoeSpec
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.rope_keys import context_length, rope_spec
from jaxhybrid.models.text_model import text_model
from jaxhybrid.models.weight_table import WeightTable, trunk_weights

MODEL_TYPES = ("qwen3_moe",)


def translate(read: ConfigReader) -> ModelConfig:
    """A published config.json as a ModelConfig. Raises ConfigError naming the key that is missing or unsupported."""
    read.require("hidden_act", "silu")
    read.require("attention_bias", False)
    read.require("use_sliding_window", False)
    read.take("sliding_window", default=None)
    read.require("qkv_bias", False)
    read.require("use_qk_norm", True)
    read.require("shared_expert_intermediate_size", 0, None)
    head_dim, positions = read.take("head_dim"), read.take("max_position_embeddings")
    rope = rope_spec(read.rope(), head_dim, positions)
    attention = AttentionSpec(
        num_attention_heads=read.take("num_attention_heads"),
        num_key_value_heads=read.take("num_key_value_heads"),
        head_dim=head_dim,
        rope=rope,
        qk_norm=True,
    )
    moe = MoeSpec(
        num_experts=read.take("num_experts", "num_local_experts"),
        num_experts_per_tok=read.take("num_experts_per_tok"),
        moe_intermediate_size=read.take("moe_intermediate_size"),
        shared_intermediate_size=0,
        shared_expert_gate=False,
        scoring="softmax",
        norm_topk_prob=read.take("norm_topk_prob", default=False),
    )
    dense = DenseSpec(read.take("intermediate_size"))
    step, dense_layers = read.take("decoder_sparse_step", default=1), read.take("mlp_only_layers", default=[])

    def layer(number: int) -> LayerSpec:
        is_moe = number not in dense_layers and (number + 1) % step == 0
        return LayerSpec(attention, moe if is_moe else dense)

    return text_model(
        read,
        model_type="qwen3_moe",
        layers=tuple(layer(number) for number in range(read.take("num_hidden_layers"))),
        max_position_embeddings=context_length(rope, positions),
    )


def weights(table: WeightTable, config: ModelConfig) -> None:
    """Published tensor names of the release, and where each goes."""
    trunk_weights(table, config)
    for number, place in enumerate(table.layers):
        prefix = f"model.layers.{number}"
        place.norms(prefix)
        place.attention(f"{prefix}.self_attn")
        if place.is_dense:
            place.dense(f"{prefix}.mlp", "ffn")
        else:
            place.add(f"{prefix}.mlp.gate.weight", "ffn", "router", "weight")
            place.experts(f"{prefix}.mlp.experts.{{expert}}.{{part}}_proj.weight", gate="gate", up="up", down="down")
