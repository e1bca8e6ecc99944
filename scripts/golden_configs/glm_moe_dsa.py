"""Tiny GLM-5 models, in the key style of the released checkpoints.

Dimensions are distinct wherever the architecture allows, so that a transposed or swapped axis cannot pass unnoticed.
Of few index heads many scores are exactly 0, and a choice among equals is anyone's: hence their number.
"""

from deepseek_reference import DEEPSEEK_REFERENCE
from golden import Config, Golden

_GLM: Config = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "eos_token_id": [2, 3],
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "glm_moe_dsa",
    "moe_layer_freq": 1,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.2.dev0",
    "use_cache": True,
}

# As GLM-5.2: layers without an indexer attend to what the last indexer chose.
_GLM_SHARED: Config = _GLM | {
    "head_dim": 8,
    "hidden_size": 40,
    "index_head_dim": 18,
    "index_n_heads": 32,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 2,
    "index_topk": 24,
    "index_topk_freq": 2,
    "indexer_types": ["full", "full", "shared", "full", "shared"],
    "intermediate_size": 66,
    "kv_lora_rank": 14,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    "moe_intermediate_size": 11,
    "n_routed_experts": 5,
    "n_shared_experts": 1,
    "num_attention_heads": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 3,
    "q_lora_rank": 26,
    "qk_head_dim": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "vocab_size": 77,
}

# As GLM-5: every layer has an indexer, the prediction layer too.
_GLM_MTP: Config = _GLM | {
    "first_k_dense_replace": 2,
    "head_dim": 6,
    "hidden_size": 44,
    "index_head_dim": 15,
    "index_n_heads": 31,
    "index_topk": 40,
    "intermediate_size": 60,
    "kv_lora_rank": 17,
    "moe_intermediate_size": 13,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 23,
    "qk_head_dim": 18,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 19,
    "vocab_size": 73,
}

GOLDENS = {
    "glm_moe_dsa_shared": Golden(_GLM_SHARED, second_reference=DEEPSEEK_REFERENCE),
    "glm_moe_dsa_mtp": Golden(_GLM_MTP, reference=DEEPSEEK_REFERENCE),
}
