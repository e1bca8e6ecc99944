"""Tiny Gemma 3 text models."""

from typing import Any

from golden import Config, Golden, Tensors

_GEMMA3: Config = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "gemma3_text",
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float32",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
}

# One global layer among six, whose rope is stretched; scores scaled by something else than the width of heads.
_A: Config = _GEMMA3 | {
    "head_dim": 26,
    "hidden_size": 44,
    "intermediate_size": 70,
    "num_attention_heads": 4,
    "num_hidden_layers": 7,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 20,
    "rope_local_base_freq": 1000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 100000.0,
    "sliding_window": 39,
    "vocab_size": 107,
}

# Another pattern, one key head, and what files since transformers 5 look like.
_B: Config = _GEMMA3 | {
    "head_dim": 18,
    "hidden_size": 60,
    "intermediate_size": 82,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 5,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 18,
    "rope_parameters": {
        "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 64,
    "tie_word_embeddings": True,
    "vocab_size": 109,
}


# The language model of a checkpoint with images.
_IMAGES: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 3,
    "eoi_token_index": 4,
    "eos_token_id": [1, 106],
    "image_token_index": 108,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 4,
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 22,
        "hidden_size": 48,
        "intermediate_size": 70,
        "model_type": "gemma3_text",
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
        "query_pre_attn_scalar": 24,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 50,
        "sliding_window_pattern": 3,
        "vocab_size": 109,
    },
    "torch_dtype": "float32",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "hidden_size": 16,
        "image_size": 16,
        "intermediate_size": 20,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "patch_size": 4,
        "vision_use_head": False,
    },
}


def is_zero_centred(name: str) -> bool:
    return "norm" in name


def random(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    """Embeddings that their scale brings to the size of what layers add: larger ones would drown it."""
    import torch

    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if "embed_tokens" in name else None


def as_published(tensors: Tensors) -> Tensors:
    return {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in tensors.items()}


GOLDENS = {
    "gemma3_a": Golden(_A, zero_centred=is_zero_centred, random=random, shards=2),
    "gemma3_images": Golden(_IMAGES, zero_centred=is_zero_centred, random=random, as_published=as_published),
    "gemma3_b": Golden(_B, zero_centred=is_zero_centred, random=random),
}
