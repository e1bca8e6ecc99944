"""The tiny models behind tests/goldens: `config.json` contents in the key style of the released checkpoints.

Dimensions are distinct wherever the architecture allows, so that a transposed or swapped axis cannot pass unnoticed.
"""

from typing import Any

Config = dict[str, Any]

_KIMI: Config = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_kimi.KimiLinearConfig",
        "AutoModel": "modeling_kimi.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mla_use_nope": True,
    "model_max_length": 4096,
    "model_type": "kimi_linear",
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.56.1",
    "use_cache": True,
    "use_grouped_topk": True,
}

_KIMI_A: Config = _KIMI | {
    "head_dim": 10,
    "hidden_size": 48,
    "intermediate_size": 76,
    "kv_lora_rank": 14,
    "linear_attn_config": {
        "full_attn_layers": [4, 6],
        "head_dim": 24,
        "kda_layers": [1, 2, 3, 5],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "moe_intermediate_size": 22,
    "num_attention_heads": 3,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 3,
    "num_shared_experts": 1,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "routed_scaling_factor": 2.446,
    "v_head_dim": 20,
    "vocab_size": 103,
}

# Low-rank queries, two dense layers, two shared experts, no renormalisation, a three-tap convolution, odd schedule.
_KIMI_B: Config = _KIMI | {
    "first_k_dense_replace": 2,
    "head_dim": 11,
    "hidden_size": 44,
    "intermediate_size": 72,
    "kv_lora_rank": 18,
    "linear_attn_config": {
        "full_attn_layers": [2, 5],
        "head_dim": 20,
        "kda_layers": [1, 3, 4],
        "num_heads": 3,
        "short_conv_kernel_size": 3,
    },
    "moe_intermediate_size": 26,
    "moe_renormalize": False,
    "num_attention_heads": 4,
    "num_experts": 7,
    "num_experts_per_token": 3,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "num_shared_experts": 2,
    "q_lora_rank": 30,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "routed_scaling_factor": 1.5,
    "v_head_dim": 16,
    "vocab_size": 101,
}

# Kimi K3's output gate on the latent attention, a multi-token-prediction layer, tied embeddings: as the demo model.
_KIMI_GATED: Config = _KIMI_A | {
    "linear_attn_config": _KIMI_A["linear_attn_config"] | {"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
    "mla_use_output_gate": True,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
    "vocab_size": 107,
}

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
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000,
    "shared_expert_intermediate_size": 30,
    "tie_word_embeddings": True,
    "vocab_size": 109,
}

_QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "float32",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}

_QWEN3_A: Config = _QWEN3 | {
    "head_dim": 28,
    "hidden_size": 64,
    "intermediate_size": 92,
    "max_window_layers": 4,
    "num_attention_heads": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 103,
}

_QWEN3_B: Config = _QWEN3 | {
    "head_dim": 18,
    "hidden_size": 60,
    "intermediate_size": 100,
    "max_window_layers": 5,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "vocab_size": 105,
}

CONFIGS: dict[str, Config] = {
    "kimi_linear_a": _KIMI_A,
    "kimi_linear_b": _KIMI_B,
    "kimi_linear_gated": _KIMI_GATED,
    "qwen3_next_a": _QWEN3_NEXT_A,
    "qwen3_next_b": _QWEN3_NEXT_B,
    "qwen3_a": _QWEN3_A,
    "qwen3_b": _QWEN3_B,
}

# Released checkpoints come in several files; so do these.
SHARDS: dict[str, int] = {"kimi_linear_b": 2, "qwen3_next_a": 3, "qwen3_b": 2}
