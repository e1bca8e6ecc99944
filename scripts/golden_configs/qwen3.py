"""Tiny Qwen3 models, in the key style of the released checkpoint.

Dimensions are distinct wherever the architecture allows, so that a transposed or swapped axis cannot pass unnoticed.
"""

from golden import Config, Golden

_QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "float32",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}

_QWEN3_A: Config = _QWEN3 | {
    "head_dim": 28,
    "hidden_size": 64,
    "intermediate_size": 92,
    "max_window_layers": 4,
    "num_attention_heads": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 103,
}

_QWEN3_B: Config = _QWEN3 | {
    "head_dim": 18,
    "hidden_size": 60,
    "intermediate_size": 100,
    "max_window_layers": 5,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "vocab_size": 105,
}

GOLDENS = {
    "qwen3_a": Golden(_QWEN3_A),
    "qwen3_b": Golden(_QWEN3_B, shards=2),
}
