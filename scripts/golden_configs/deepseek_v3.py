"""Tiny DeepSeek-V3 and Kimi K2 models, in the key style of the released checkpoints.

Dimensions are distinct wherever the architecture allows, so that a transposed or swapped axis cannot pass unnoticed.
"""

import re

from deepseek_reference import DEEPSEEK_REFERENCE
from golden import Config, Golden, Tensors
from golden_quantised import fp8_scales, from_fp8, to_fp8

BLOCK = (16, 12)  # rows and columns of an FP8 weight that share a scale; 128 x 128 in releases

V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v3",
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 48,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "transformers_version": "4.46.3",
    "use_cache": True,
}

V3_A: Config = V3 | {
    "hidden_size": 44,
    "intermediate_size": 76,
    "kv_lora_rank": 14,
    "moe_intermediate_size": 10,
    "n_group": 4,
    "n_routed_experts": 8,
    "num_attention_heads": 3,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 3,
    "q_lora_rank": 30,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "topk_group": 2,
    "v_head_dim": 20,
    "vocab_size": 87,
}

# A prediction layer, and FP8 weights in blocks that divide no dimension.
_V3_FP8: Config = V3_A | {
    "hidden_size": 40,
    "intermediate_size": 58,
    "n_group": 2,
    "n_routed_experts": 6,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    },
    "topk_group": 1,
    "vocab_size": 83,
}

# As Kimi K2: one group, two dense layers, two shared experts, no renormalisation, another stretch of the context.
_KIMI_K2: Config = V3 | {
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 2,
    "hidden_size": 48,
    "intermediate_size": 72,
    "kv_lora_rank": 18,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 14,
    "n_group": 1,
    "n_routed_experts": 7,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 5,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 5,
    "q_lora_rank": 26,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "rope_scaling": V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 1.827,
    "seq_aux": True,
    "topk_group": 1,
    "v_head_dim": 16,
    "vocab_size": 89,
}


def stored(tensors: Tensors) -> Tensors:
    """Projections in FP8 with a scale a block; the prediction layer repeats embedding and head, as in releases."""
    kept: Tensors = {}
    for name, tensor in tensors.items():
        if not re.search(r"layers\.\d+\.(self_attn|mlp)\..*proj(_with_mqa)?\.weight$", name):
            kept[name] = tensor
            continue
        scales = fp8_scales(tensor, BLOCK)
        kept[f"{name}_scale_inv"], kept[name] = scales, to_fp8(tensor, scales, BLOCK)
        if name.endswith("kv_a_proj_with_mqa.weight"):
            last = name.split(".self_attn")[0]
    kept[f"{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    kept[f"{last}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return kept


def loaded(tensors: Tensors) -> Tensors:
    """The values that FP8 weights and their scales stand for."""
    values: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith("_scale_inv"):
            scales = tensors.get(f"{name}_scale_inv")
            values[name] = tensor if scales is None else from_fp8(tensor, scales, BLOCK)
    return values


GOLDENS = {
    "deepseek_v3_a": Golden(V3_A, second_reference=DEEPSEEK_REFERENCE),
    "deepseek_v3_fp8": Golden(_V3_FP8, reference=DEEPSEEK_REFERENCE, stored=stored, loaded=loaded),
    # transformers does not know the name kimi_k2.
    "kimi_k2": Golden(_KIMI_K2, shards=2, reference=DEEPSEEK_REFERENCE),
}
