"""A plain torch reference for DeepSeek-V2, V3 and V3.2 and for GLM-5, with their prediction layer.

`transformers` leaves the prediction layer out. Tensors are read under their published names, there is no cache, and
the trunk equals `transformers` (make_goldens.py checks that on every run).

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1) for latent attention, DeepSeek-V3 (2412.19437, sections 2.1.2 and
2.2) for the router and multi-token prediction, DeepSeek-V3.2-Exp (report, section 2.1) for the indexer, YaRN
(2309.00071, sections 3.1 to 3.4) for the rotary frequencies.
"""

import math
from typing import Any

import torch
from golden import Config, OwnReference
from torch import Tensor
from torch.nn import functional as F

INNER_NORM_EPS = 1e-6  # of the norms inside latent attention and the indexer, whatever rms_norm_eps says


class DeepSeekReference:
    """`tensors` carry their published names, all of one floating dtype."""

    def __init__(self, config: Config, tensors: dict[str, Tensor]):
        self.config = config
        self.tensors = tensors
        # Which keys each query sees ([B,T,T]): an indexer's choice, kept for the layers that share it.
        self.visible = torch.empty(0)

    def __call__(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """input_ids [B,T] -> logits [B,T,V] and, with a prediction layer, its logits [B,T-1,V] (row t: token t+2)."""
        x = self.tensors["model.embed_tokens.weight"][input_ids]
        for index in range(self.config["num_hidden_layers"]):
            x = self.layer(index, x)
        hidden = self.norm("model.norm", x)
        further = self.next_n(input_ids, hidden) if self.config.get("num_nextn_predict_layers") else None
        return self.linear("lm_head", hidden), further

    def next_n(self, input_ids: Tensor, hidden: Tensor) -> Tensor:
        index = self.config["num_hidden_layers"]
        name = f"model.layers.{index}"
        embedded = self.norm(f"{name}.enorm", self.tensors["model.embed_tokens.weight"][input_ids[:, 1:]])
        previous = self.norm(f"{name}.hnorm", hidden[:, :-1])
        x = self.layer(index, self.linear(f"{name}.eh_proj", torch.cat([embedded, previous], -1)))
        return self.linear("lm_head", self.norm(f"{name}.shared_head.norm", x))

    def layer(self, index: int, x: Tensor) -> Tensor:
        name = f"model.layers.{index}"
        x = x + self.attention(index, f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
        normed = self.norm(f"{name}.post_attention_layernorm", x)
        mixture = f"{name}.mlp.gate.weight" in self.tensors
        return x + (self.experts if mixture else self.mlp)(f"{name}.mlp", normed)

    def attention(self, index: int, name: str, x: Tensor) -> Tensor:
        config = self.config
        heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        low_rank = x
        if config["q_lora_rank"]:
            low_rank = self.norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x), INNER_NORM_EPS)
        q = self.linear(f"{name}.q_b_proj" if config["q_lora_rank"] else f"{name}.q_proj", low_rank)
        q = q.unflatten(-1, (heads, nope + rope))
        latent, k_rope = self.linear(f"{name}.kv_a_proj_with_mqa", x).split([config["kv_lora_rank"], rope], -1)
        latent = self.norm(f"{name}.kv_a_layernorm", latent, INNER_NORM_EPS)
        kv = self.linear(f"{name}.kv_b_proj", latent).unflatten(-1, (heads, -1))
        scores = torch.einsum("bthd,bshd->bhts", q[..., :nope], kv[..., :nope])
        k_rope = self.rotate(k_rope[:, :, None], interleaved=True)[:, :, 0]
        scores = scores + torch.einsum("bthd,bsd->bhts", self.rotate(q[..., nope:], interleaved=True), k_rope)
        if not config.get("index_topk"):
            self.visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None]
        elif f"{name}.indexer.wk.weight" in self.tensors:
            self.visible = self.indexer(f"{name}.indexer", x, low_rank)
        scores = scores * (nope + rope) ** -0.5 * self.yarn_scale()
        weights = scores.masked_fill(~self.visible[:, None], float("-inf")).softmax(-1)
        out = torch.einsum("bhts,bshd->bthd", weights, kv[..., nope:])
        return self.linear(f"{name}.o_proj", out.flatten(-2))

    def indexer(self, name: str, x: Tensor, low_rank: Tensor) -> Tensor:
        config = self.config
        heads, dim, rope = config["index_n_heads"], config["index_head_dim"], config["qk_rope_head_dim"]
        interleaved = config["model_type"] == "glm_moe_dsa"

        def turn(t: Tensor) -> Tensor:
            return torch.cat([self.rotate(t[..., :rope], interleaved), t[..., rope:]], -1)

        q = turn(self.linear(f"{name}.wq_b", low_rank).unflatten(-1, (heads, dim)))
        norm = (self.tensors[f"{name}.k_norm.weight"], self.tensors[f"{name}.k_norm.bias"])
        k = turn(F.layer_norm(self.linear(f"{name}.wk", x), (dim,), *norm, INNER_NORM_EPS)[:, :, None])[:, :, 0]
        weights = self.linear(f"{name}.weights_proj", x) * heads**-0.5
        scores = (torch.einsum("bthd,bsd->bths", q, k).relu() * weights[..., None]).sum(2) * dim**-0.5
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
        best = scores.topk(min(config["index_topk"], x.shape[1]), -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & causal

    def rotate(self, x: Tensor, interleaved: bool) -> Tensor:
        """x [B,T,H,d] by its position, in pairs of neighbours or of halves."""
        frequencies, magnitude = self.frequencies(x.shape[-1], x.dtype)
        angles = (torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies)[:, None]
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        pair = [a * cos - b * sin, b * cos + a * sin]
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    def frequencies(self, dim: int, dtype: torch.dtype) -> tuple[Tensor, float]:
        options = {key: self.rope(key) for key in ("type", "beta_fast", "beta_slow", "factor")}
        options["original_max_position_embeddings"] = self.rope("original_max_position_embeddings")
        turns = yarn_frequencies(dim, self.rope("rope_theta"), options, dtype)
        if self.rope("type") != "yarn":
            return turns, 1.0
        return turns, self.stretch(self.rope("mscale")) / self.stretch(self.rope("mscale_all_dim"))

    def yarn_scale(self) -> float:
        """Scores are multiplied by this for YaRN, on top of what is in cos and sin."""
        return self.stretch(self.rope("mscale_all_dim")) ** 2 if self.rope("type") == "yarn" else 1.0

    def stretch(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.rope("factor")) + 1

    def rope(self, key: str) -> Any:
        config = self.config
        options = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]} | (config["rope_scaling"] or {})
        return options.get(key)

    def experts(self, name: str, x: Tensor) -> Tensor:
        config = self.config
        count, per_token = config["n_routed_experts"], config["num_experts_per_tok"]
        logits = self.linear(f"{name}.gate", x)
        if config["model_type"] == "deepseek_v2":
            scores = logits.softmax(-1)
            choice = self.best_groups(scores, best=1, outside=0.0)
        else:
            scores = logits.sigmoid()
            biased = scores + self.tensors[f"{name}.gate.e_score_correction_bias"]
            choice = self.best_groups(biased, best=2, outside=float("-inf"))
        chosen = choice.topk(per_token, -1).indices
        weights = scores.gather(-1, chosen)
        if config["model_type"] != "deepseek_v2" and config["norm_topk_prob"]:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * config["routed_scaling_factor"]
        out = self.mlp(f"{name}.shared_experts", x)
        for expert in range(count):
            weight = (weights * (chosen == expert)).sum(-1, keepdim=True)
            out = out + weight * self.mlp(f"{name}.experts.{expert}", x)
        return out

    def best_groups(self, scores: Tensor, best: int, outside: float) -> Tensor:
        """Scores, but `outside` in all groups but the `topk_group` whose `best` best experts score highest together."""
        groups = self.config["n_group"]
        if groups == 1:
            return scores
        grouped = scores.unflatten(-1, (groups, -1))
        kept = grouped.topk(best, -1).values.sum(-1).topk(self.config["topk_group"], -1).indices
        mask = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, kept, True)
        return grouped.masked_fill(~mask[..., None], outside).flatten(-2)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        hidden = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", hidden)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        variance = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + (eps or self.config["rms_norm_eps"])) * self.tensors[f"{name}.weight"]


def yarn_frequencies(dim: int, theta: float, options: Config, dtype: torch.dtype) -> Tensor:
    """Radians per position of each pair of channels; unstretched without `"type": "yarn"`."""
    plain = theta ** (-torch.arange(0, dim, 2, dtype=dtype) / dim)
    if options.get("type") != "yarn":
        return plain

    def channel(rotations: float) -> float:
        original = options["original_max_position_embeddings"]
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(channel(options["beta_fast"])), math.ceil(channel(options["beta_slow"]))
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=dtype) - low) / (high - low if high > low else 0.001)
    return plain * (1 - ramp.clamp(0, 1)) + plain / options["factor"] * ramp.clamp(0, 1)


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Published name and shape of every tensor that `DeepSeekReference` reads under this config."""
    hidden, trunk = config["hidden_size"], config["num_hidden_layers"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    kinds = config.get("indexer_types") or ["full"] * trunk
    for index in range(trunk + config.get("num_nextn_predict_layers", 0)):
        name = f"model.layers.{index}"
        shapes |= {f"{name}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if index >= trunk:
            shapes |= {f"{name}.{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
            shapes[f"{name}.eh_proj.weight"] = (hidden, 2 * hidden)
        shapes |= _attention_shapes(f"{name}.self_attn", config)
        if config.get("index_topk") and (index >= trunk or kinds[index] == "full"):
            shapes |= _indexer_shapes(f"{name}.self_attn.indexer", config)
        if index < config["first_k_dense_replace"]:
            shapes |= _mlp_shapes(f"{name}.mlp", hidden, config["intermediate_size"])
        else:
            shapes |= _expert_shapes(f"{name}.mlp", config)
    return shapes


def _attention_shapes(name: str, config: Config) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        f"{name}.kv_a_layernorm.weight": (rank,),
        f"{name}.kv_b_proj.weight": (heads * (nope + value), rank),
        f"{name}.o_proj.weight": (hidden, heads * value),
    }
    if (q_rank := config["q_lora_rank"]) is None:
        return shapes | {f"{name}.q_proj.weight": (heads * (nope + rope), hidden)}
    return shapes | {
        f"{name}.q_a_proj.weight": (q_rank, hidden),
        f"{name}.q_a_layernorm.weight": (q_rank,),
        f"{name}.q_b_proj.weight": (heads * (nope + rope), q_rank),
    }


def _indexer_shapes(name: str, config: Config) -> dict[str, tuple[int, ...]]:
    hidden, heads, dim = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    return {
        f"{name}.wq_b.weight": (heads * dim, config["q_lora_rank"]),
        f"{name}.wk.weight": (dim, hidden),
        f"{name}.k_norm.weight": (dim,),
        f"{name}.k_norm.bias": (dim,),
        f"{name}.weights_proj.weight": (heads, hidden),
    }


def _expert_shapes(name: str, config: Config) -> dict[str, tuple[int, ...]]:
    hidden, width, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    shapes = _mlp_shapes(f"{name}.shared_experts", hidden, width * config["n_shared_experts"])
    shapes[f"{name}.gate.weight"] = (count, hidden)
    if config["model_type"] != "deepseek_v2":
        shapes[f"{name}.gate.e_score_correction_bias"] = (count,)
    for expert in range(count):
        shapes |= _mlp_shapes(f"{name}.experts.{expert}", hidden, width)
    return shapes


def _mlp_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
    return shapes | {f"{name}.down_proj.weight": (hidden, width)}


DEEPSEEK_REFERENCE = OwnReference(DeepSeekReference, tensor_shapes)
