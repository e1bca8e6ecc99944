"""Tiny Llamas: each rope scaling, tied and untied, with and without biases."""

from golden import Config, Golden

_LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float32",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
}

# Grouped queries, no head_dim key, the scaling of Llama 3.1.
_A: Config = _LLAMA | {
    "attention_bias": False,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 101,
}

# One key head, biases, heads that are not hidden / heads wide, tied, linear scaling as older files spell it.
_B: Config = _LLAMA | {
    "attention_bias": True,
    "head_dim": 22,
    "hidden_size": 52,
    "intermediate_size": 84,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 107,
}

# As many key heads as query heads, YaRN as files since transformers 5 spell it.
_C: Config = _LLAMA | {
    "attention_bias": False,
    "head_dim": 26,
    "hidden_size": 48,
    "intermediate_size": 92,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "rope_parameters": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rope_type": "yarn",
    },
    "tie_word_embeddings": False,
    "vocab_size": 103,
}

GOLDENS = {"llama_a": Golden(_A, shards=2), "llama_b": Golden(_B), "llama_yarn": Golden(_C)}
