"""Tiny Kimi K3 models, in the key style of the released checkpoint: experts in MXFP4, a vision tower.

Dimensions are distinct wherever the architecture allows, so that a transposed or swapped axis cannot pass unnoticed;
what experts multiply is a multiple of 32, the groups of MXFP4.
"""

import re
from functools import partial
from typing import Any

from golden import Config, Golden, OwnReference, Tensors
from golden_quantised import from_fp4, to_fp4
from kimi_k3_reference import KimiK3Reference
from kimi_k3_reference import shapes as text_shapes
from kimi_k3_vision_reference import image_arrays
from kimi_k3_vision_reference import shapes as vision_shapes

_QUANTISED: Config = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "targets": ["Linear"],
            "weights": {"group_size": 32, "num_bits": 4, "symmetric": True, "type": "float"},
        }
    },
    "format": "mxfp4-pack-quantized",
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*", "re:vision_tower.*"],
    "quant_method": "compressed-tensors",
}

_TEXT: Config = {
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "max_position_embeddings": 4096,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "quantization_config": _QUANTISED,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
}


_VISION: Config = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_time": 4,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
}


def _whole(text: Config, tower: Config) -> Config:
    """The placeholder is a token that no random prompt has."""
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "float32",
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": 0,
        "model_type": "kimi_k3",
        "text_config": _TEXT | text,
        "tie_word_embeddings": False,
        "vision_config": _VISION
        | {"text_hidden_size": text["hidden_size"], "mm_hidden_size": tower["vt_hidden_size"]}
        | tower,
    }


# Blocks of two layers, the last layer on its own; KDA in runs of two.
_A = _whole(
    {
        "attn_res_block_size": 2,
        "hidden_size": 44,
        "intermediate_size": 70,
        "kv_lora_rank": 18,
        "linear_attn_config": {
            "full_attn_layers": [3, 5],
            "gate_lower_bound": -5.0,
            "head_dim": 16,
            "kda_layers": [1, 2, 4],
            "num_heads": 3,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "moe_intermediate_size": 64,
        "num_attention_heads": 3,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_hidden_layers": 5,
        "num_key_value_heads": 3,
        "num_shared_experts": 2,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 6,
        "routed_expert_hidden_size": 32,
        "v_head_dim": 14,
        "vocab_size": 101,
    },
    {
        "init_pos_emb_height": 5,
        "init_pos_emb_width": 5,
        "patch_size": 3,
        "qkv_hidden_size": 24,
        "vt_hidden_size": 18,
        "vt_intermediate_size": 30,
        "vt_num_attention_heads": 3,
        "vt_num_hidden_layers": 2,
    },
)

# Blocks of three, a shorter convolution, a tighter bound, other squashing, weights that are not normalised.
_B = _whole(
    {
        "activation_situ_beta": 1.5,
        "activation_situ_linear_beta": 2.5,
        "attn_res_block_size": 3,
        "hidden_size": 40,
        "intermediate_size": 52,
        "kv_lora_rank": 14,
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "gate_lower_bound": -2.0,
            "head_dim": 10,
            "kda_layers": [1, 3],
            "num_heads": 4,
            "short_conv_kernel_size": 3,
            "use_full_rank_gate": True,
        },
        "moe_intermediate_size": 32,
        "moe_renormalize": False,
        "num_attention_heads": 2,
        "num_experts": 5,
        "num_experts_per_token": 3,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_shared_experts": 1,
        "q_lora_rank": 22,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "routed_expert_hidden_size": 64,
        "routed_scaling_factor": 1.7,
        "v_head_dim": 18,
        "vocab_size": 103,
    },
    {
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 4,
        "patch_size": 4,
        "qkv_hidden_size": 32,
        "vt_hidden_size": 20,
        "vt_intermediate_size": 26,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 3,
    },
)


def _random(name: str, shape: tuple[int, ...], generator: Any, heads: int) -> Any:
    import torch

    if name.endswith("A_log"):  # the heads' rates, and zeros behind them
        rates = torch.log(torch.empty(shape).uniform_(0.3, 3.0, generator=generator))
        return torch.where(torch.arange(shape[0]) < heads, rates, 0.0)
    if name.endswith("res_proj.weight"):  # sharper choices of a block would make much of rounding
        return torch.randn(shape, generator=generator) * 0.4 * shape[-1] ** -0.5
    if name.endswith("patch_embed.proj.weight"):
        return torch.randn(shape, generator=generator) / (shape[1] * shape[2] * shape[3]) ** 0.5
    return None


def _stored(tensors: Tensors) -> Tensors:
    """Experts in packed MXFP4."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if re.search(r"experts\.\d+\.w\d\.weight$", name):
            stored[f"{name}_packed"], stored[f"{name}_scale"] = to_fp4(tensor)
        else:
            stored[name] = tensor
    return stored


def _loaded(stored: Tensors) -> Tensors:
    tensors: Tensors = {}
    for name, tensor in stored.items():
        if name.endswith("_packed"):
            base = name.removesuffix("_packed")
            tensors[base] = from_fp4(tensor, stored[f"{base}_scale"])
        elif not name.endswith("weight_scale"):
            tensors[name] = tensor
    return tensors


def _golden(config: Config) -> Golden:
    heads = config["text_config"]["linear_attn_config"]["num_heads"]
    return Golden(
        config, random=partial(_random, heads=heads), stored=_stored, loaded=_loaded, further=image_arrays,
        reference=OwnReference(KimiK3Reference, lambda config: text_shapes(config) | vision_shapes(config)),
    )  # fmt: skip


GOLDENS = {"kimi_k3_a": _golden(_A), "kimi_k3_b": _golden(_B)}
