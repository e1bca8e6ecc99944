"""Falcon-H1."""

from golden import Config, Golden

_BASE: Config = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_layer_indices": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mamba_norm_before_gate": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "falcon_h1",
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.52.0",
    "use_cache": True,
}

# As the smaller models: no norm in Mamba-2, a width of its own.
_A: Config = _BASE | {
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 1.7,
    "head_dim": 10,
    "hidden_size": 48,
    "intermediate_size": 62,
    "key_multiplier": 0.6,
    "lm_head_multiplier": 0.4,
    "mamba_d_head": 18,
    "mamba_d_ssm": 72,
    "mamba_d_state": 14,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_rms_norm": False,
    "mlp_multipliers": [0.88, 0.58],
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.7, 0.9, 0.8, 1.2, 1.1],
    "ssm_out_multiplier": 0.65,
    "vocab_size": 61,
}

# As the largest: a norm in Mamba-2 over groups; no multipliers, no bias in a three-tap convolution, limited steps.
_B: Config = _BASE | {
    "head_dim": 12,
    "hidden_size": 40,
    "intermediate_size": 54,
    "mamba_conv_bias": False,
    "mamba_d_conv": 3,
    "mamba_d_head": "auto",
    "mamba_d_ssm": None,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_n_heads": 4,
    "mamba_rms_norm": True,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "rope_theta": 10000.0,
    "time_step_limit": [0.1, 0.6],
    "vocab_size": 59,
}

GOLDENS = {"falcon_h1_a": Golden(_A), "falcon_h1_b": Golden(_B)}
