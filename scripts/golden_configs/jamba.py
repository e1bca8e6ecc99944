"""Jamba."""

from typing import Any

from golden import Config, Golden

_BASE: Config = {
    "architectures": ["JambaForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mamba_expand": 2,
    "max_position_embeddings": 4096,
    "model_type": "jamba",
    "num_logits_to_keep": 1,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "use_mamba_kernels": True,
}

_A: Config = _BASE | {
    "attn_layer_offset": 2,
    "attn_layer_period": 4,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_size": 36,
    "intermediate_size": 44,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 7,
    "mamba_dt_rank": 10,
    "mamba_proj_bias": False,
    "num_attention_heads": 6,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}

# Biases in the projections and none in a three-tap convolution, another schedule, a derived rank, tied embeddings.
_B: Config = _BASE | {
    "attn_layer_offset": 1,
    "attn_layer_period": 3,
    "eos_token_id": [2, 5],
    "expert_layer_offset": 0,
    "expert_layer_period": 3,
    "hidden_size": 40,
    "intermediate_size": 50,
    "mamba_conv_bias": False,
    "mamba_d_conv": 3,
    "mamba_d_state": 6,
    "mamba_dt_rank": "auto",
    "mamba_expand": 3,
    "mamba_proj_bias": True,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "vocab_size": 59,
}


def _random(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    import torch

    if name.endswith("dt_proj.bias"):
        return torch.randn(shape, generator=generator) * 0.7 - 1.0
    if name.endswith("router.weight"):
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5
    if name.endswith("final_layernorm.weight"):
        # A scale of either sign, or a tied head would only ever repeat the token it was given.
        return torch.randn(shape, generator=generator)
    return None


GOLDENS = {"jamba_a": Golden(_A, random=_random), "jamba_b": Golden(_B, random=_random, shards=2)}
