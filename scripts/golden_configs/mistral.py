"""Tiny Mistrals: a window on every layer, and none."""

from typing import Any

from golden import Config, Golden

_MISTRAL: Config = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "mistral",
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float32",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
}

_A: Config = _MISTRAL | {
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_attention_heads": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 3,
    "rope_theta": 10000.0,
    "sliding_window": 43,
    "tie_word_embeddings": False,
    "vocab_size": 101,
}

# As of v0.2: no window, another theta, heads that are not hidden / heads wide.
_B: Config = _MISTRAL | {
    "head_dim": 26,
    "hidden_size": 48,
    "intermediate_size": 92,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 107,
}


def decode_with_dynamic_scaling(model: Any, config: Config, seed: int) -> dict[str, Any]:
    """dynamic_ids [130] and the logits [130,V] of decoding them one by one: three times 48 positions by dynamic NTK."""
    import torch

    vocabulary = config["vocab_size"]
    scaled = type(model.config).from_dict(
        config | {"max_position_embeddings": 48, "rope_scaling": {"factor": 3.0, "type": "dynamic"}}
    )
    stretched = type(model)._from_config(scaled, attn_implementation="eager", dtype=torch.float32).eval()
    stretched.load_state_dict(model.state_dict())
    ids = torch.randint(3, vocabulary, (130,), generator=torch.Generator().manual_seed(seed))
    cache, logits = None, []
    with torch.no_grad():
        for token in ids:
            made = stretched(token[None, None], cache=cache, use_cache=True)
            cache = made.cache
            logits.append(made.logits[0, 0])
    return {"dynamic_ids": ids.int().numpy(), "dynamic_logits": torch.stack(logits).numpy()}


GOLDENS = {
    "mistral_a": Golden(_A),
    "mistral_b": Golden(_B, shards=2, further=decode_with_dynamic_scaling),
}
