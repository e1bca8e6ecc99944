"""Tiny Qwen3.5 models, in the key style of the released checkpoints.

Dimensions are distinct wherever the architecture allows, so that a transposed or swapped axis cannot pass unnoticed.
"""

import re
from collections import defaultdict

import torch
from golden import Config, Golden, Tensors
from golden_images import image_arrays
from qwen_prediction import prediction_logits, prediction_tensors

_TEXT: Config = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "float32",
    "eos_token_id": 2,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "use_cache": True,
}


def _rope(theta: float, factor: float, sections: list[int]) -> Config:
    return {
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": sections,
            "partial_rotary_factor": factor,
            "rope_theta": theta,
            "rope_type": "default",
        }
    }


_DENSE: Config = (
    _TEXT
    | {
        "head_dim": 24,
        "hidden_size": 44,
        "intermediate_size": 68,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 26,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 10,
        "num_attention_heads": 4,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "vocab_size": 103,
    }
    | _rope(10000000, 0.5, [3, 2, 1])
)

_MOE: Config = (
    _TEXT
    | {
        "head_dim": 32,
        "hidden_size": 40,
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 18,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_value_head_dim": 20,
        "moe_intermediate_size": 14,
        "num_attention_heads": 3,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 22,
        "vocab_size": 107,
    }
    | _rope(10000, 0.25, [2, 1, 1])
)


def _whole(text: Config, kind: str, tied: bool, tower: Config) -> Config:
    """The text part and a vision tower. Placeholders are tokens that no random prompt has."""
    return {
        "architectures": [f"Qwen3_5{'Moe' if kind.endswith('moe') else ''}ForConditionalGeneration"],
        "image_token_id": 0,
        "model_type": kind,
        "text_config": text | {"model_type": f"{kind}_text", "mtp_num_hidden_layers": 0, "tie_word_embeddings": tied},
        "tie_word_embeddings": tied,
        "video_token_id": 1,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "initializer_range": 0.02,
            "model_type": kind,
            "out_hidden_size": text["hidden_size"],
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        }
        | tower,
        "vision_end_token_id": 4,
        "vision_start_token_id": 3,
    }


_TOWER_A: Config = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 34,
    "num_heads": 2,
    "num_position_embeddings": 25,
    "patch_size": 3,
}
_TOWER_B: Config = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 26,
    "num_heads": 4,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def _zero_centred(name: str) -> bool:
    """Every norm of the text part multiplies by 1 + weight but the gated one after the delta rule."""
    return "norm" in name and "linear_attn.norm" not in name and "visual" not in name


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor | None:
    if name.endswith("patch_embed.proj.weight"):
        return torch.randn(shape, generator=generator) / (shape[1] * shape[2] * shape[3] * shape[4]) ** 0.5
    if name.endswith("pos_embed.weight"):
        return torch.randn(shape, generator=generator)
    if re.search(r"experts\.(gate_up|down)_proj$", name):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    return None


def _as_published(tensors: Tensors) -> Tensors:
    """transformers 5.24 saves the trunk's experts one by one; released files keep them fused."""
    published: Tensors = {}
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            experts[match[1]][int(match[2]), match[3]] = tensor
        else:
            published[name] = tensor
    for prefix, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        both = [torch.cat([parts[number, "gate"], parts[number, "up"]]) for number in range(count)]
        published[f"{prefix}.gate_up_proj"] = torch.stack(both)
        published[f"{prefix}.down_proj"] = torch.stack([parts[number, "down"] for number in range(count)])
    return published


def _with_prediction(config: Config) -> Golden:
    """Beside the tensors that transformers knows, those of the prediction layer."""

    def as_published(tensors: Tensors) -> Tensors:
        return _as_published(tensors) | prediction_tensors(config)

    return Golden(
        config, shards=2, zero_centred=_zero_centred, random=_random, as_published=as_published, mtp=prediction_logits
    )


def _with_images(config: Config) -> Golden:
    return Golden(config, zero_centred=_zero_centred, random=_random, as_published=_as_published, further=image_arrays)


_TEXT_A = _DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "tie_word_embeddings": True,
}  # fmt: skip
_TEXT_B = _MOE | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "tie_word_embeddings": False,
}  # fmt: skip

GOLDENS = {
    "qwen3_5_text": _with_prediction(_TEXT_A),
    "qwen3_5_moe_text": _with_prediction(_TEXT_B),
    "qwen3_5_vl": _with_images(_whole(_DENSE, "qwen3_5", False, _TOWER_A)),
    "qwen3_5_moe_vl": _with_images(_whole(_MOE, "qwen3_5_moe", False, _TOWER_B)),
}
