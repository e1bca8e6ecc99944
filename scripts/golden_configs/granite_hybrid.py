"""Granite 4 hybrid."""

from typing import Any

from golden import Config, Golden

_BASE: Config = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.1,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "max_position_embeddings": 4096,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.56.0",
    "use_cache": True,
}

# As Granite 4.0 Small and Tiny: experts beside a shared one, no positions.
_MOE: Config = _BASE | {
    "attention_multiplier": 0.4,
    "embedding_multiplier": 1.5,
    "hidden_size": 40,
    "intermediate_size": 26,
    "layer_types": ["mamba", "attention", "mamba"],
    "logits_scaling": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 14,
    "mamba_n_groups": 1,
    "mamba_n_heads": 5,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.7,
    "shared_intermediate_size": 34,
    "vocab_size": 61,
}

# As Granite 4.0 Micro: no experts; here with rotary positions, biases in attention, two groups, an untied head.
_DENSE: Config = _BASE | {
    "attention_bias": True,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.5,
    "hidden_size": 48,
    "intermediate_size": 58,
    "layer_types": ["attention", "mamba", "mamba", "attention"],
    "logits_scaling": 3,
    "mamba_conv_bias": False,
    "mamba_d_conv": 3,
    "mamba_d_head": "auto",
    "mamba_d_state": 18,
    "mamba_n_groups": 2,
    "mamba_n_heads": 8,
    "mamba_proj_bias": True,
    "num_attention_heads": 6,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 4,
    "num_key_value_heads": 3,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "residual_multiplier": 0.5,
    "shared_intermediate_size": 58,
    "tie_word_embeddings": False,
    "vocab_size": 59,
}


def _random(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    import torch

    if name.endswith("router.weight"):
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5
    return None


GOLDENS = {"granite_hybrid_a": Golden(_MOE, random=_random), "granite_hybrid_dense": Golden(_DENSE)}
