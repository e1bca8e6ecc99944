"""Bamba."""

from golden import Config, Golden

_BASE: Config = {
    "architectures": ["BambaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "bamba",
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.48.0.dev0",
    "use_cache": True,
    "use_mamba_kernels": True,
}

_A: Config = _BASE | {
    "attn_layer_indices": [1],
    "attn_rotary_emb": 6,
    "hidden_size": 48,
    "intermediate_size": 62,
    "mamba_d_head": 16,
    "mamba_d_state": 14,
    "mamba_n_groups": 1,
    "mamba_n_heads": 6,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}

# Two groups, biases but in a three-tap convolution, limited steps, attention first and twice.
_B: Config = _BASE | {
    "attention_bias": True,
    "attn_layer_indices": [0, 2],
    "hidden_size": 40,
    "intermediate_size": 54,
    "mamba_conv_bias": False,
    "mamba_d_conv": 3,
    "mamba_d_head": "auto",
    "mamba_d_state": 18,
    "mamba_expand": 3,
    "mamba_n_groups": 2,
    "mamba_n_heads": 4,
    "mamba_proj_bias": True,
    "num_attention_heads": 5,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "rope_theta": 500.0,
    "time_step_limit": [0.1, 0.6],
    "vocab_size": 59,
}


GOLDENS = {"bamba_a": Golden(_A), "bamba_b": Golden(_B)}
