"""Tiny Kimi Linear models, in the key style of the released checkpoint.

Dimensions are distinct wherever the architecture allows, so that a transposed or swapped axis cannot pass unnoticed.
"""

import re

from golden import Config, Golden, Tensors
from golden_references import KIMI_REFERENCE

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


def _as_published(tensors: Tensors) -> Tensors:
    """transformers 5.24 also renames the dense layers' MLP on saving; released files keep `mlp` there."""
    return {re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name): t for name, t in tensors.items()}


GOLDENS = {
    "kimi_linear_a": Golden(_KIMI_A, as_published=_as_published, second_reference=KIMI_REFERENCE),
    "kimi_linear_b": Golden(_KIMI_B, shards=2, as_published=_as_published, second_reference=KIMI_REFERENCE),
    "kimi_linear_gated": Golden(_KIMI_GATED, reference=KIMI_REFERENCE),
}
