"""Nemotron-H (dense) and Nemotron 3 (experts, experts on a latent, a prediction layer)."""

import json
import tempfile
from pathlib import Path
from typing import Any

from golden import Config, Golden, Tensors

_BASE: Config = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 16,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    # transformers limits the step size from below by time_step_min, but in a prefill only; nobody else does.
    "time_step_floor": 1e-9,
    "time_step_max": 0.1,
    "time_step_min": 1e-9,
    "torch_dtype": "float32",
    "transformers_version": "4.48.0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
}

# As Nemotron-H: dense feed-forwards.
_DENSE: Config = _BASE | {
    "attention_head_dim": 20,
    "head_dim": 20,
    "hidden_size": 48,
    "hybrid_override_pattern": "M-M*-M",
    "intermediate_size": 76,
    "mamba_head_dim": 10,
    "mamba_num_heads": 6,
    "n_groups": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "ssm_state_size": 14,
    "time_step_limit": [0.0, float("inf")],
    "vocab_size": 61,
}

# As Nemotron 3 Nano; with biases in the projections, none in a three-tap convolution, and one group of heads.
_MOE: Config = _BASE | {
    "conv_kernel": 3,
    "head_dim": 12,
    "hidden_size": 44,
    "hybrid_override_pattern": "MEM*EM",
    "intermediate_size": 26,
    "mamba_head_dim": 16,
    "mamba_num_heads": 4,
    "moe_intermediate_size": 26,
    "moe_shared_expert_intermediate_size": 38,
    "n_group": 1,
    "n_groups": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 3,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 18,
    "topk_group": 1,
    "use_bias": True,
    "use_conv_bias": False,
    "vocab_size": 59,
}

# As Nemotron 3 Super: experts work on a latent, in groups; a prediction layer; parts spelt out.
_LATENT: Config = _BASE | {
    "head_dim": 18,
    "hidden_size": 40,
    "intermediate_size": 30,
    "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe"],
    "mamba_head_dim": 14,
    "mamba_num_heads": 4,
    "moe_intermediate_size": 30,
    "moe_latent_size": 22,
    "moe_shared_expert_intermediate_size": 34,
    "moe_shared_expert_overlap": False,
    "mtp_hybrid_override_pattern": "*E",
    "n_group": 2,
    "n_groups": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 5.0,
    "ssm_state_size": 12,
    "topk_group": 1,
    "vocab_size": 53,
}


def _random(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    import torch

    if name.endswith("embeddings.weight"):
        return torch.randn(shape, generator=generator)
    if name.endswith("gate.weight"):
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5
    return None


def _prediction_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width, kv_width = heads * config["head_dim"], kv_heads * config["head_dim"]
    latent, inner, shared = (
        config[key] for key in ("moe_latent_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    attention, experts = "mtp.layers.0", "mtp.layers.1"
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{attention}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")},
        f"{attention}.eh_proj.weight": (hidden, 2 * hidden),
        f"{attention}.mixer.q_proj.weight": (width, hidden),
        **{f"{attention}.mixer.{name}_proj.weight": (kv_width, hidden) for name in "kv"},
        f"{attention}.mixer.o_proj.weight": (hidden, width),
        **{f"{experts}.{name}.weight": (hidden,) for name in ("norm", "final_layernorm")},
        f"{experts}.mixer.gate.weight": (config["n_routed_experts"], hidden),
        f"{experts}.mixer.gate.e_score_correction_bias": (config["n_routed_experts"],),
        f"{experts}.mixer.fc1_latent_proj.weight": (latent, hidden),
        f"{experts}.mixer.fc2_latent_proj.weight": (hidden, latent),
        f"{experts}.mixer.shared_experts.up_proj.weight": (shared, hidden),
        f"{experts}.mixer.shared_experts.down_proj.weight": (hidden, shared),
    }
    for expert in range(config["n_routed_experts"]):
        shapes[f"{experts}.mixer.experts.{expert}.up_proj.weight"] = (inner, latent)
        shapes[f"{experts}.mixer.experts.{expert}.down_proj.weight"] = (latent, inner)
    return shapes


def _with_prediction(tensors: Tensors) -> Tensors:
    """transformers neither makes nor saves prediction layers."""
    import torch

    generator = torch.Generator().manual_seed(7)
    made = {}
    for name, shape in _prediction_shapes(_LATENT).items():
        spread = 0.25 if len(shape) == 1 else shape[-1] ** -0.5
        offset = 1.0 if "norm" in name else 0.0
        made[name] = torch.randn(shape, generator=generator) * spread + offset
    return tensors | made


def _predict(config: Config, tensors: Tensors, input_ids: Any, trunk: Any) -> Any:
    """The prediction layer's two blocks as a model of their own, given what they take in place of embeddings."""
    import torch
    import transformers
    from safetensors.torch import save_file

    def rms_norm(name: str, x: Any) -> Any:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + config["layer_norm_epsilon"])
        return x * scale * tensors[f"mtp.layers.0.{name}.weight"]

    blocks = {
        name.replace("mtp.", "backbone."): tensor.contiguous()
        for name, tensor in tensors.items()
        if name.startswith("mtp.") and name.split(".")[3] in ("norm", "mixer")
    }
    blocks["backbone.norm_f.weight"] = tensors["mtp.layers.1.final_layernorm.weight"]
    blocks |= {name: tensors[name] for name in ("backbone.embeddings.weight", "lm_head.weight")}
    blocks_config = config | {"layers_block_type": ["attention", "moe"], "num_hidden_layers": 2}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(blocks_config))
        save_file(blocks, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model = transformers.NemotronHForCausalLM.from_pretrained(
            folder, dtype=trunk.dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
    embedded = tensors["backbone.embeddings.weight"][input_ids[:, 1:]]
    joined = torch.cat([rms_norm("enorm", embedded), rms_norm("hnorm", trunk[:, :-1])], dim=-1)
    x = joined @ tensors["mtp.layers.0.eh_proj.weight"].T
    return model(inputs_embeds=x, use_cache=False).logits


GOLDENS = {
    "nemotron_h_a": Golden(_DENSE, random=_random),
    "nemotron_h_moe": Golden(_MOE, random=_random, shards=2),
    "nemotron_h_latent": Golden(_LATENT, random=_random, as_published=_with_prediction, mtp=_predict),
}
