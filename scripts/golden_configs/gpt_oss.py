"""Tiny gpt-oss models: experts as they are, and as published in MXFP4."""

from typing import Any

from golden import Config, Golden, Tensors
from golden_quantised import GROUP, from_fp4, to_fp4

_GPT_OSS: Config = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initial_context_length": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "gpt_oss",
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "router_aux_loss_coef": 0.9,
    "torch_dtype": "float32",
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
}

# Windows on every other layer as published; a limit that clamps.
_A: Config = _GPT_OSS | {
    "experts_per_token": 3,
    "head_dim": 18,
    "hidden_size": 44,
    "intermediate_size": 26,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 6,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 41,
    "swiglu_limit": 1.5,
    "tie_word_embeddings": False,
    "vocab_size": 101,
}

# Another order of layers, one key head, tied, no scaling. Widths are multiples of 32, the groups of MXFP4.
_B: Config = _GPT_OSS | {
    "head_dim": 22,
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "num_attention_heads": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 128, "rope_type": "yarn"},
    "rope_theta": 10000,
    "sliding_window": 57,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 107,
}


def random(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    """Experts are stored [in, out], and a sink has to compete with scores around zero."""
    import torch

    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return torch.randn(shape, generator=generator) * shape[-2] ** -0.5
    if name.endswith("router.weight"):
        return torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5
    if name.endswith("sinks"):
        return 1.0 + torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) * 0.3 if name.endswith("bias") else None


def pack(tensors: Tensors) -> Tensors:
    """Experts [E, in, out] in MXFP4, as rows [E, out, in]; the rest in bfloat16."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed, stored[f"{name}_scales"] = to_fp4(tensor.mT)
            stored[f"{name}_blocks"] = packed.unflatten(-1, (-1, GROUP // 2))
        else:
            stored[name] = tensor.bfloat16()
    return stored


def unpack(stored: Tensors) -> Tensors:
    tensors: Tensors = {}
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            tensors[base] = from_fp4(tensor.flatten(-2), stored[f"{base}_scales"]).mT
        elif not name.endswith("_scales"):
            tensors[name] = tensor.float()
    return tensors


GOLDENS = {
    "gpt_oss_a": Golden(_A, random=random, shards=2),
    "gpt_oss_mxfp4": Golden(_B, random=random, stored=pack, loaded=unpack),
}
