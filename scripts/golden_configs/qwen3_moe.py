"""Tiny Qwen3-MoE models."""

from golden import Config, Golden

_QWEN3_MOE: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "qwen3_moe",
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "torch_dtype": "float32",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}

_A: Config = _QWEN3_MOE | {
    "decoder_sparse_step": 1,
    "head_dim": 18,
    "hidden_size": 44,
    "intermediate_size": 70,
    "max_window_layers": 3,
    "mlp_only_layers": [],
    "moe_intermediate_size": 26,
    "norm_topk_prob": True,
    "num_attention_heads": 6,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 103,
}

# Dense layers by step and by list, weights that do not add up to one, tied, the YaRN that its model card recommends.
_B: Config = _QWEN3_MOE | {
    "decoder_sparse_step": 2,
    "head_dim": 22,
    "hidden_size": 52,
    "intermediate_size": 68,
    "max_window_layers": 5,
    "mlp_only_layers": [3],
    "moe_intermediate_size": 30,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 64, "rope_type": "yarn"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 109,
}

GOLDENS = {"qwen3_moe_a": Golden(_A, shards=3), "qwen3_moe_b": Golden(_B)}
