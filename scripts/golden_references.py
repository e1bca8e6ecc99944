"""A plain torch reference for Kimi Linear with Kimi K3's gated latent attention and a DeepSeek-V3 prediction layer.

`transformers` has neither option. Tensors are read under their published names, the recurrence is the sequential
definition, and without the options the result equals `transformers` (make_goldens.py checks that on every run).

Sources: Kimi Linear (arXiv 2510.26692) for the delta rule and its gates, DeepSeek-V2 (2405.04434, section 2.1) for
latent attention, DeepSeek-V3 (2412.19437, sections 2.1.2 and 2.2) for the router and multi-token prediction.
"""

import torch
from golden import Config, OwnReference
from torch import Tensor
from torch.nn import functional as F

LATENT_NORM_EPS = 1e-6  # the norms inside latent attention keep their own epsilon, whatever rms_norm_eps says


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class KimiReference:
    """Text model of Kimi Linear; `tensors` carry their published names, all of one floating dtype."""

    def __init__(self, config: Config, tensors: dict[str, Tensor]):
        self.config = config
        self.tensors = tensors

    def __call__(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """input_ids [B,T] -> logits [B,T,V] and, with a prediction layer, its logits [B,T-1,V] (row t: token t+2)."""
        config = self.config
        x = self.tensors["model.embed_tokens.weight"][input_ids]
        for index in range(config["num_hidden_layers"]):
            x = self.layer(index, x)
        hidden = self.norm("model.norm", x)
        if not config["num_nextn_predict_layers"]:
            return self.head(hidden), None
        return self.head(hidden), self.next_n(input_ids, hidden)

    def next_n(self, input_ids: Tensor, hidden: Tensor) -> Tensor:
        index = self.config["num_hidden_layers"]
        name = f"model.layers.{index}"
        embedded = self.norm(f"{name}.enorm", self.tensors["model.embed_tokens.weight"][input_ids[:, 1:]])
        previous = self.norm(f"{name}.hnorm", hidden[:, :-1])
        x = self.layer(index, self.linear(f"{name}.eh_proj", torch.cat([embedded, previous], -1)))
        return self.head(self.norm(f"{name}.shared_head.norm", x))

    def layer(self, index: int, x: Tensor) -> Tensor:
        name = f"model.layers.{index}"
        is_kda = index + 1 in self.config["linear_attn_config"]["kda_layers"]  # published layer numbers start at one
        mixer = self.kimi_delta_attention if is_kda else self.latent_attention
        x = x + mixer(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
        normed = self.norm(f"{name}.post_attention_layernorm", x)
        if index < self.config["first_k_dense_replace"]:
            return x + self.mlp(f"{name}.mlp", normed)
        return x + self.experts(f"{name}.block_sparse_moe", normed)

    def kimi_delta_attention(self, name: str, x: Tensor) -> Tensor:
        options = self.config["linear_attn_config"]
        heads, dim = options["num_heads"], options["head_dim"]

        def split(t: Tensor) -> Tensor:
            return t.unflatten(-1, (heads, dim))

        q, k, v = (split(self.short_conv(f"{name}.{n}_conv1d", self.linear(f"{name}.{n}_proj", x))) for n in "qkv")
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * dim**-0.5
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        step = self.linear(f"{name}.f_b_proj", self.linear(f"{name}.f_a_proj", x)) + self.tensors[f"{name}.dt_bias"]
        decay = self.log_decay(name, split(step)).exp()
        beta = self.linear(f"{name}.b_proj", x).sigmoid()
        state = x.new_zeros(x.shape[0], heads, dim, dim)
        outputs = []
        for t in range(x.shape[1]):
            state = state * decay[:, t, ..., None]
            update = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
            state = state + k[:, t, ..., None] * update[..., None, :]
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        out = self.norm(f"{name}.o_norm", torch.stack(outputs, 1))
        gate = split(self.output_gate(name, x)).sigmoid()
        return self.linear(f"{name}.o_proj", (out * gate).flatten(-2))

    def log_decay(self, name: str, step: Tensor) -> Tensor:
        rate = self.tensors[f"{name}.A_log"].reshape(-1, 1).exp()
        return -rate * F.softplus(step)

    def output_gate(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.g_b_proj", self.linear(f"{name}.g_a_proj", x))

    def short_conv(self, name: str, x: Tensor) -> Tensor:
        weight = self.tensors[f"{name}.weight"]
        padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
        return F.silu(F.conv1d(padded, weight, groups=weight.shape[0])).transpose(1, 2)

    def latent_attention(self, name: str, x: Tensor) -> Tensor:
        config = self.config
        heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        if config["q_lora_rank"]:
            low_rank = self.linear(f"{name}.q_a_proj", x)
            q = self.linear(f"{name}.q_b_proj", self.norm(f"{name}.q_a_layernorm", low_rank, LATENT_NORM_EPS))
        else:
            q = self.linear(f"{name}.q_proj", x)
        q = q.unflatten(-1, (heads, nope + rope))
        latent, k_rope = self.linear(f"{name}.kv_a_proj_with_mqa", x).split([config["kv_lora_rank"], rope], -1)
        latent = self.norm(f"{name}.kv_a_layernorm", latent, LATENT_NORM_EPS)
        kv = self.linear(f"{name}.kv_b_proj", latent).unflatten(-1, (heads, -1))
        k_nope, v = kv[..., :nope], kv[..., nope:]
        # No rotation (mla_use_nope): the "rope" part is one more unrotated key shared by all heads.
        scores = torch.einsum("bthd,bshd->bhts", q[..., :nope], k_nope)
        scores = (scores + torch.einsum("bthd,bsd->bhts", q[..., nope:], k_rope)) * (nope + rope) ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out = torch.einsum("bhts,bshd->bthd", weights, v).flatten(-2)
        if config.get("mla_use_output_gate"):
            out = out * self.linear(f"{name}.g_proj", x).sigmoid()
        return self.linear(f"{name}.o_proj", out)

    def experts(self, name: str, x: Tensor) -> Tensor:
        return self.routed(name, x, x) + self.mlp(f"{name}.shared_experts", x)

    def routed(self, name: str, x: Tensor, inner: Tensor) -> Tensor:
        """The chosen experts' weighted sum: chosen by x, fed with `inner`."""
        config = self.config
        scores = self.linear(f"{name}.gate", x).sigmoid()
        # The correction bias chooses the experts but does not weigh them.
        biased = scores + self.tensors[f"{name}.gate.e_score_correction_bias"]
        chosen = biased.topk(config["num_experts_per_token"], -1).indices
        weights = scores.gather(-1, chosen)
        if config["moe_renormalize"]:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * config["routed_scaling_factor"]
        out = torch.zeros_like(inner)
        for expert in range(config["num_experts"]):
            weight = (weights * (chosen == expert)).sum(-1, keepdim=True)
            out = out + weight * self.mlp(f"{name}.experts.{expert}", inner, gate="w1", up="w3", down="w2")
        return out

    def mlp(
        self, name: str, x: Tensor, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
    ) -> Tensor:
        hidden = self.activation(self.linear(f"{name}.{gate}", x), self.linear(f"{name}.{up}", x))
        return self.linear(f"{name}.{down}", hidden)

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def head(self, x: Tensor) -> Tensor:
        name = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        return self.linear(name, x)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], eps or self.config["rms_norm_eps"])


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Published name and shape of every tensor that `KimiReference` reads under this config."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    trunk = config["num_hidden_layers"]
    for index in range(trunk + config["num_nextn_predict_layers"]):
        name = f"model.layers.{index}"
        if index >= trunk:
            shapes |= {f"{name}.{n}.weight": (hidden,) for n in ("enorm", "hnorm", "shared_head.norm")}
            shapes[f"{name}.eh_proj.weight"] = (hidden, 2 * hidden)
        shapes |= {f"{name}.{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
        is_kda = index + 1 in config["linear_attn_config"]["kda_layers"]
        shapes |= (_kda_shapes if is_kda else _latent_shapes)(f"{name}.self_attn", config)
        if index < config["first_k_dense_replace"]:
            shapes |= _mlp_shapes(f"{name}.mlp", hidden, config["intermediate_size"])
        else:
            shapes |= _expert_shapes(f"{name}.block_sparse_moe", config)
    return shapes


def _kda_shapes(name: str, config: Config) -> dict[str, tuple[int, ...]]:
    options, hidden = config["linear_attn_config"], config["hidden_size"]
    heads, dim, taps = options["num_heads"], options["head_dim"], options["short_conv_kernel_size"]
    width = heads * dim
    return (
        {f"{name}.{n}_proj.weight": (width, hidden) for n in "qkv"}
        | {f"{name}.{n}_conv1d.weight": (width, 1, taps) for n in "qkv"}
        | {f"{name}.{n}_a_proj.weight": (dim, hidden) for n in "fg"}
        | {f"{name}.{n}_b_proj.weight": (width, dim) for n in "fg"}
        | {f"{name}.A_log": (1, 1, heads, 1), f"{name}.dt_bias": (width,), f"{name}.b_proj.weight": (heads, hidden)}
        | {f"{name}.o_norm.weight": (dim,), f"{name}.o_proj.weight": (hidden, width)}
    )


def _latent_shapes(name: str, config: Config) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        f"{name}.kv_a_layernorm.weight": (rank,),
        f"{name}.kv_b_proj.weight": (heads * (nope + value), rank),
        f"{name}.o_proj.weight": (hidden, heads * value),
    }
    if q_rank := config["q_lora_rank"]:
        shapes[f"{name}.q_a_proj.weight"] = (q_rank, hidden)
        shapes[f"{name}.q_a_layernorm.weight"] = (q_rank,)
        shapes[f"{name}.q_b_proj.weight"] = (heads * (nope + rope), q_rank)
    else:
        shapes[f"{name}.q_proj.weight"] = (heads * (nope + rope), hidden)
    if config.get("mla_use_output_gate"):
        shapes[f"{name}.g_proj.weight"] = (heads * value, hidden)
    return shapes


def _expert_shapes(name: str, config: Config) -> dict[str, tuple[int, ...]]:
    hidden, width, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    shapes = _mlp_shapes(f"{name}.shared_experts", hidden, width * config["num_shared_experts"])
    shapes |= {f"{name}.gate.weight": (count, hidden), f"{name}.gate.e_score_correction_bias": (count,)}
    for expert in range(count):
        shapes |= {f"{name}.experts.{expert}.{n}.weight": (width, hidden) for n in ("w1", "w3")}
        shapes[f"{name}.experts.{expert}.w2.weight"] = (hidden, width)
    return shapes


def _mlp_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.{n}_proj.weight": (width, hidden) for n in ("gate", "up")}
    shapes[f"{name}.down_proj.weight"] = (hidden, width)
    return shapes


KIMI_REFERENCE = OwnReference(KimiReference, tensor_shapes)
