"""Tiny DeepSeek-V4 models, in the key style of the released checkpoint.

Dimensions are distinct wherever the architecture allows, so that a transposed or swapped axis cannot pass unnoticed.
Of few index heads many scores are exactly 0, and a choice among equals is anyone's: hence their number.
"""

import re
from typing import Any

import torch
from deepseek_v4_reference import DEEPSEEK_V4_REFERENCE
from golden import Config, Golden, Tensors
from golden_quantised import fp8_scales, from_fp4, from_fp8, to_fp4, to_fp8

_V4: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "compress_rope_theta": 160000,
    "eos_token_id": 2,
    "hc_eps": 1e-06,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v4",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "transformers_version": "4.57.1",
    "use_cache": True,
}

# Every kind of layer; strides spelt per kind, because transformers only knows those of the releases by number.
_V4_A: Config = _V4 | {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 20,
    "hidden_size": 36,
    "index_head_dim": 14,
    "index_n_heads": 32,
    "index_topk": 10,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "moe_intermediate_size": 11,
    "n_routed_experts": 5,
    "n_shared_experts": 1,
    "num_attention_heads": 6,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 4,
    "o_groups": 2,
    "o_lora_rank": 17,
    "q_lora_rank": 26,
    "qk_rope_head_dim": 8,
    "sliding_window": 12,
    "swiglu_limit": 2.0,
    "vocab_size": 71,
}

# Three streams, no stretched context, another window and stride, and the prediction layer.
_V4_MTP: Config = _V4 | {
    "compress_ratios": [8, 4, 0, 0],
    "hc_mult": 3,
    "hc_sinkhorn_iters": 7,
    "head_dim": 18,
    "hidden_size": 40,
    "index_head_dim": 13,
    "index_n_heads": 31,
    "index_topk": 20,
    "moe_intermediate_size": 9,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_attention_heads": 6,
    "num_experts_per_tok": 3,
    "num_hash_layers": 2,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "o_groups": 3,
    "o_lora_rank": 10,
    "q_lora_rank": 22,
    "qk_rope_head_dim": 6,
    "rope_scaling": None,
    "routed_scaling_factor": 2.5,
    "sliding_window": 21,
    "swiglu_limit": 1.5,
    "vocab_size": 67,
}

# As released: projections in FP8 blocks that divide no dimension, experts in FP4, all scales powers of two.
BLOCK = (16, 12)
_V4_FP4: Config = _V4 | {
    "compress_ratios": [0, 4, 8],
    "expert_dtype": "fp4",
    "hc_mult": 2,
    "hc_sinkhorn_iters": 12,
    "head_dim": 22,
    "hidden_size": 64,
    "index_head_dim": 12,
    "index_n_heads": 30,
    "index_topk": 15,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 3,
    "o_groups": 2,
    "o_lora_rank": 14,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 10,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": list(BLOCK),
    },
    "sliding_window": 17,
    "swiglu_limit": 2.5,
    "vocab_size": 73,
}
_FP8 = re.compile(r".*\.(attn\.w(q_a|q_b|kv|o_a|o_b)|attn\.indexer\.wq_b|shared_experts\.w[123])\.weight")
_EXPERT = re.compile(r".*\.experts\.\d+\.w[123]\.weight")


def _stored(tensors: Tensors) -> Tensors:
    kept: Tensors = {}
    for name, tensor in tensors.items():
        scale = f"{name.removesuffix('.weight')}.scale"
        if _EXPERT.fullmatch(name):
            packed, exponents = to_fp4(tensor)
            kept[name], kept[scale] = packed.view(torch.int8), exponents.view(torch.float8_e8m0fnu)
        elif _FP8.fullmatch(name):
            powers = torch.exp2(torch.ceil(torch.log2(fp8_scales(tensor, BLOCK))))
            kept[name], kept[scale] = to_fp8(tensor, powers, BLOCK), powers.to(torch.float8_e8m0fnu)
        else:
            kept[name] = tensor
    return kept


def _loaded(stored: Tensors) -> Tensors:
    values: Tensors = {}
    for name, tensor in stored.items():
        scale = f"{name.removesuffix('.weight')}.scale"
        if tensor.dtype == torch.int8:
            values[name] = from_fp4(tensor.view(torch.uint8), stored[scale].view(torch.uint8))
        elif tensor.dtype == torch.float8_e4m3fn:
            values[name] = from_fp8(tensor, stored[scale], BLOCK)
        elif not name.endswith(".scale"):
            values[name] = tensor
    return values


def _random(config: Config):
    """What only DeepSeek-V4 has, under its published names or those of transformers."""

    def make(name: str, shape: tuple[int, ...], generator: Any) -> Any:
        leaf = name.rsplit(".", 1)[-1]

        def normal(mean: float, std: float):
            return torch.randn(shape, generator=generator) * std + mean

        if leaf == "tid2eid":
            experts = [torch.randperm(config["n_routed_experts"], generator=generator) for _ in range(shape[0])]
            return torch.stack(experts)[:, : shape[1]]
        if leaf.endswith("scale"):
            return torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
        if leaf.endswith("fn"):
            return normal(0.0, 2.0 / shape[-1] ** 0.5)
        if leaf.endswith("base") or leaf in ("ape", "position_bias"):
            return normal(0.0, 0.7)
        if leaf in ("attn_sink", "sinks"):
            return normal(0.5, 1.0)
        if name.endswith("gate.bias"):
            return normal(0.0, 0.15)
        if name.endswith("gate.weight") and "wgate" not in name:
            return normal(0.0, 1.5 / shape[-1] ** 0.5)
        return normal(0.0, 1.0) if name == "embed.weight" else None

    return make


def _as_published(tensors: Tensors) -> Tensors:
    """transformers 5.24 leaves some names of its own when it saves."""
    names = (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"(layers\.\d+\.attn)\.norm\.", r"\1.kv_norm."),
    )
    published = {}
    for name, tensor in tensors.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        published[name] = tensor
    return published


GOLDENS = {
    "deepseek_v4_a": Golden(
        _V4_A, random=_random(_V4_A), as_published=_as_published, second_reference=DEEPSEEK_V4_REFERENCE
    ),
    "deepseek_v4_fp4": Golden(
        _V4_FP4, random=_random(_V4_FP4), reference=DEEPSEEK_V4_REFERENCE, stored=_stored, loaded=_loaded
    ),
    "deepseek_v4_mtp": Golden(_V4_MTP, random=_random(_V4_MTP), reference=DEEPSEEK_V4_REFERENCE),
}
