"""The prediction layer of Qwen3-Next and Qwen3.5 in plain torch, which transformers leaves out.

One gated-attention layer over fc [norm of the next token's embedding | norm of the trunk's output]. Every norm
multiplies by 1 + weight. Experts, where there are any, are stored one by one.
"""

import torch
from golden import Config, Tensors
from torch import Tensor
from torch.nn import functional as F

LAYER = "mtp.layers.0"


def prediction_logits(config: Config, tensors: Tensors, input_ids: Tensor, trunk: Tensor) -> Tensor:
    """input_ids [B,T], trunk [B,T,D] after the final norm -> logits [B,T-1,V]; row t predicts token t+2."""

    def norm(name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"])
        return x * scale * (1 + tensors[f"{name}.weight"])

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"])

    def swiglu(name: str, x: Tensor) -> Tensor:
        return linear(f"{name}.down_proj", F.silu(linear(f"{name}.gate_proj", x)) * linear(f"{name}.up_proj", x))

    def attention(name: str, x: Tensor) -> Tensor:
        heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        q, gate = linear(f"{name}.q_proj", x).unflatten(-1, (heads, 2 * dim)).chunk(2, -1)
        k, v = (linear(f"{name}.{part}_proj", x).unflatten(-1, (groups, dim)) for part in "kv")
        q, k = turned(config, norm(f"{name}.q_norm", q)), turned(config, norm(f"{name}.k_norm", k))
        k, v = (t.repeat_interleave(heads // groups, 2) for t in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * dim**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out = torch.einsum("bhts,bshd->bthd", weights, v) * gate.sigmoid()
        return linear(f"{name}.o_proj", out.flatten(-2))

    def experts(name: str, x: Tensor) -> Tensor:
        weights, chosen = linear(f"{name}.gate", x).softmax(-1).topk(config["num_experts_per_tok"], -1)
        if config.get("norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        out = linear(f"{name}.shared_expert_gate", x).sigmoid() * swiglu(f"{name}.shared_expert", x)
        for number in range(config["num_experts"]):
            weight = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + weight * swiglu(f"{name}.experts.{number}", x)
        return out

    embedded = norm("mtp.pre_fc_norm_embedding", tensors["model.embed_tokens.weight"][input_ids[:, 1:]])
    x = linear("mtp.fc", torch.cat([embedded, norm("mtp.pre_fc_norm_hidden", trunk[:, :-1])], -1))
    x = x + attention(f"{LAYER}.self_attn", norm(f"{LAYER}.input_layernorm", x))
    feed_forward = experts if "num_experts" in config else swiglu
    x = x + feed_forward(f"{LAYER}.mlp", norm(f"{LAYER}.post_attention_layernorm", x))
    return linear("model.embed_tokens" if config["tie_word_embeddings"] else "lm_head", norm("mtp.norm", x))


def turned(config: Config, x: Tensor) -> Tensor:
    """Rotary positions over the first part of each head, as two halves. x [B,T,H,d]"""
    rope = config.get("rope_parameters", config)
    half = int(config["head_dim"] * rope["partial_rotary_factor"]) // 2
    turns = rope["rope_theta"] ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] * turns
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def prediction_tensors(config: Config) -> Tensors:
    """Random ones, to go with those that transformers makes of the trunk."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator) * (0.25 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in prediction_shapes(config).items()
    }


def prediction_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Published name and shape of every tensor that `prediction_logits` reads beside the trunk's."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes: dict[str, tuple[int, ...]] = {f"mtp.{name}.weight": (hidden,) for name in norms}
    shapes |= {f"{LAYER}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {f"{LAYER}.self_attn.{part}_norm.weight": (dim,) for part in "qk"}
    shapes |= {f"{LAYER}.self_attn.{part}_proj.weight": (groups * dim, hidden) for part in "kv"}
    shapes[f"{LAYER}.self_attn.q_proj.weight"] = (2 * heads * dim, hidden)
    shapes[f"{LAYER}.self_attn.o_proj.weight"] = (hidden, heads * dim)
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    if "num_experts" not in config:
        return shapes | _swiglu_shapes(f"{LAYER}.mlp", hidden, config["intermediate_size"])
    shapes[f"{LAYER}.mlp.gate.weight"] = (config["num_experts"], hidden)
    shapes[f"{LAYER}.mlp.shared_expert_gate.weight"] = (1, hidden)
    shapes |= _swiglu_shapes(f"{LAYER}.mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
    for number in range(config["num_experts"]):
        shapes |= _swiglu_shapes(f"{LAYER}.mlp.experts.{number}", hidden, config["moe_intermediate_size"])
    return shapes


def _swiglu_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
    return shapes | {f"{name}.down_proj.weight": (hidden, width)}
