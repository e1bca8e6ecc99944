"""Tiny DeepSeek-V2 models, in the key style of the released checkpoints.

Dimensions are distinct wherever the architecture allows, so that a transposed or swapped axis cannot pass unnoticed.
"""

from deepseek_reference import DEEPSEEK_REFERENCE
from golden import Config, Golden

_V2: Config = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v2",
    "moe_layer_freq": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.33.1",
    "use_cache": True,
}

_YARN: Config = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 48,
    "type": "yarn",
}

# As V2: low-rank queries, experts of the best groups.
_V2_A: Config = _V2 | {
    "hidden_size": 45,
    "intermediate_size": 76,
    "kv_lora_rank": 14,
    "moe_intermediate_size": 10,
    "n_group": 4,
    "n_routed_experts": 12,
    "num_attention_heads": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 30,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rope_scaling": _YARN,
    "routed_scaling_factor": 4.0,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "v_head_dim": 20,
    "vocab_size": 87,
}

# As V2-Lite: queries of full rank, the best experts of all; and without a longer context.
_V2_LITE: Config = _V2 | {
    "first_k_dense_replace": 2,
    "hidden_size": 48,
    "intermediate_size": 72,
    "kv_lora_rank": 18,
    "moe_intermediate_size": 14,
    "n_group": 1,
    "n_routed_experts": 7,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "rope_scaling": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 16,
    "vocab_size": 89,
}

GOLDENS = {
    "deepseek_v2_a": Golden(_V2_A, second_reference=DEEPSEEK_REFERENCE),
    "deepseek_v2_lite": Golden(_V2_LITE, shards=2, second_reference=DEEPSEEK_REFERENCE),
}
