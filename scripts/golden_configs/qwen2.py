"""Tiny Qwen2s: untied with heads that are hidden / heads wide, and tied with YaRN."""

from golden import Config, Golden

_QWEN2: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "max_window_layers": 3,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
}

_A: Config = _QWEN2 | {
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "vocab_size": 101,
}

_B: Config = _QWEN2 | {
    "hidden_size": 56,
    "intermediate_size": 92,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 1024, "type": "yarn"},
    "tie_word_embeddings": True,
    "vocab_size": 107,
}

GOLDENS = {"qwen2_a": Golden(_A), "qwen2_b": Golden(_B, shards=2)}
