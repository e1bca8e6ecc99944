"""Tiny Qwen3-Next models, in the key style of the released checkpoint.

Dimensions are distinct wherever the architecture allows, so that a transposed or swapped axis cannot pass unnoticed.
"""

from golden import Config, Golden, Tensors
from qwen_prediction import prediction_logits, prediction_tensors

_QWEN3_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "norm_topk_prob": True,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
}

_QWEN3_NEXT_A: Config = _QWEN3_NEXT | {
    "head_dim": 16,
    "hidden_size": 40,
    "intermediate_size": 76,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 30,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 18,
    "moe_intermediate_size": 14,
    "num_attention_heads": 6,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 8,
    "num_key_value_heads": 3,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 22,
    "vocab_size": 103,
}

# A dense layer among the sparse ones, half-rotated heads, an interval of three, three value heads to a key head, tied.
_QWEN3_NEXT_B: Config = _QWEN3_NEXT | {
    "full_attention_interval": 3,
    "head_dim": 20,
    "hidden_size": 36,
    "intermediate_size": 64,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 14,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 26,
    "mtp_num_hidden_layers": 1,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000,
    "shared_expert_intermediate_size": 30,
    "tie_word_embeddings": True,
    "vocab_size": 109,
}


def _zero_centred(name: str) -> bool:
    """Every norm multiplies by 1 + weight but the gated one after the delta rule."""
    return "norm" in name and "linear_attn.norm" not in name


def _with_prediction(tensors: Tensors) -> Tensors:
    return tensors | prediction_tensors(_QWEN3_NEXT_B)


GOLDENS = {
    "qwen3_next_a": Golden(_QWEN3_NEXT_A, shards=3, zero_centred=_zero_centred),
    "qwen3_next_b": Golden(
        _QWEN3_NEXT_B, zero_centred=_zero_centred, as_published=_with_prediction, mtp=prediction_logits
    ),
}
