"""A plain torch reference for DeepSeek-V4 with its prediction layer, written from arXiv 2606.19348.

`transformers` leaves the prediction layer out. Tensors are read under their published names, there is no cache, and
the trunk equals `transformers` (make_goldens.py checks that on every run).
"""

import torch
from deepseek_reference import yarn_frequencies
from golden import Config, OwnReference
from torch import Tensor
from torch.nn import functional as F

SPARSE_STRIDE = 4


def strides_of(config: Config) -> list[int]:
    if "compress_ratios" in config:
        return config["compress_ratios"]
    rates = {"sliding_attention": 0, **config["compress_rates"]}
    return [rates[kind] for kind in config["layer_types"]] + [0]


class DeepSeekV4Reference:
    """`tensors` carry their published names, of one floating dtype."""

    def __init__(self, config: Config, tensors: dict[str, Tensor]):
        self.config = config
        self.tensors = tensors

    def __call__(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """input_ids [B,T] -> logits [B,T,V] and, with a prediction layer, its logits [B,T-1,V] (row t: token t+2)."""
        streams = self.tensors["embed.weight"][input_ids][:, :, None].expand(-1, -1, self.config["hc_mult"], -1)
        for index, stride in enumerate(strides_of(self.config)[: self.config["num_hidden_layers"]]):
            streams = self.layer(f"layers.{index}", stride, streams, input_ids)
        logits = self.linear("head", self.norm("norm", self.collapse("hc_head", streams)))
        if not self.config.get("num_nextn_predict_layers"):
            return logits, None
        return logits, self.next_n("mtp.0", input_ids[:, 1:], streams[:, :-1])

    def next_n(self, name: str, following: Tensor, streams: Tensor) -> Tensor:
        embedded = self.norm(f"{name}.enorm", self.tensors["embed.weight"][following])
        joined = self.linear(f"{name}.h_proj", self.norm(f"{name}.hnorm", streams))
        joined = joined + self.linear(f"{name}.e_proj", embedded)[:, :, None]
        streams = self.layer(name, 0, joined, following)
        return self.linear("head", self.norm(f"{name}.norm", self.collapse(f"{name}.hc_head", streams)))

    def layer(self, name: str, stride: int, streams: Tensor, input_ids: Tensor) -> Tensor:
        x, post, mixing = self.connect(f"{name}.hc_attn", streams)
        out = self.attention(f"{name}.attn", stride, self.norm(f"{name}.attn_norm", x))
        streams = post[..., None] * out[:, :, None] + torch.einsum("btjk,btjd->btkd", mixing, streams)
        x, post, mixing = self.connect(f"{name}.hc_ffn", streams)
        out = self.experts(f"{name}.ffn", self.norm(f"{name}.ffn_norm", x), input_ids)
        return post[..., None] * out[:, :, None] + torch.einsum("btjk,btjd->btkd", mixing, streams)

    def connect(self, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a part sees [B,T,D], where its output goes [B,T,n], how the streams mix [B,T,n,n]."""
        count, eps = self.config["hc_mult"], self.config["hc_eps"]
        sizes = [count, count, count * count]
        parts = self.unit(streams.flatten(-2)) @ self.tensors[f"{name}_fn"].T
        scales, bases = self.tensors[f"{name}_scale"], self.tensors[f"{name}_base"].split(sizes)
        pre, post, mixing = (p * s + b for p, s, b in zip(parts.split(sizes, -1), scales, bases, strict=True))
        mixing = mixing.unflatten(-1, (count, count)).softmax(-1) + eps
        mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            mixing = mixing / (mixing.sum(-1, keepdim=True) + eps)
            mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
        return ((pre.sigmoid() + eps)[..., None] * streams).sum(-2), 2 * post.sigmoid(), mixing

    def collapse(self, name: str, streams: Tensor) -> Tensor:
        weights = self.unit(streams.flatten(-2)) @ self.tensors[f"{name}_fn"].T
        weights = weights * self.tensors[f"{name}_scale"] + self.tensors[f"{name}_base"]
        return ((weights.sigmoid() + self.config["hc_eps"])[..., None] * streams).sum(-2)

    def attention(self, name: str, stride: int, x: Tensor) -> Tensor:
        config, steps = self.config, x.shape[1]
        heads, dim = config["num_attention_heads"], config["head_dim"]
        places = torch.arange(steps)
        low_rank = self.norm(f"{name}.q_norm", self.linear(f"{name}.wq_a", x))
        q = self.unit(self.linear(f"{name}.wq_b", low_rank).unflatten(-1, (heads, dim)))
        q = self.turn(q, places, stride)
        keys = self.turn(self.norm(f"{name}.kv_norm", self.linear(f"{name}.wkv", x))[:, :, None], places, stride)[
            :, :, 0
        ]
        behind = places[:, None] - places
        visible = ((behind >= 0) & (behind < config["sliding_window"])).expand(x.shape[0], -1, -1)
        if stride:
            entries = self.entries(f"{name}.compressor", x, stride, dim)
            seen = torch.arange(entries.shape[1]) < ((places + 1) // stride)[:, None]
            seen = seen.expand(x.shape[0], -1, -1)
            if stride == SPARSE_STRIDE:
                seen = self.choice(f"{name}.indexer", x, low_rank, seen)
            keys, visible = torch.cat([keys, entries], 1), torch.cat([visible, seen], -1)
        scores = torch.einsum("bthd,bsd->bths", q, keys) * dim**-0.5
        scores = scores.masked_fill(~visible[:, :, None], float("-inf"))
        sinks = self.tensors[f"{name}.attn_sink"][:, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        out = self.turn(torch.einsum("bths,bsd->bthd", weights, keys), -places, stride)
        groups = config["o_groups"]
        wide = self.tensors[f"{name}.wo_a.weight"].unflatten(0, (groups, -1))
        out = torch.einsum("btgi,goi->btgo", out.flatten(-2).unflatten(-1, (groups, -1)), wide)
        return self.linear(f"{name}.wo_b", out.flatten(-2))

    def entries(self, name: str, x: Tensor, stride: int, dim: int) -> Tensor:
        """One for every complete window [B,W,dim]."""
        count = x.shape[1] // stride
        windows = x[:, : count * stride]
        values = self.linear(f"{name}.wkv", windows).unflatten(1, (count, stride))
        gates = self.linear(f"{name}.wgate", windows).unflatten(1, (count, stride)) + self.tensors[f"{name}.ape"]
        if stride == SPARSE_STRIDE:
            # The first half of every token's channels goes to the next window's entry, the second to its own.
            values = torch.cat([F.pad(values[:, :-1, :, :dim], (0, 0, 0, 0, 1, 0)), values[..., dim:]], 2)
            before = F.pad(gates[:, :-1, :, :dim], (0, 0, 0, 0, 1, 0), value=float("-inf"))
            gates = torch.cat([before, gates[..., dim:]], 2)
        pooled = self.norm(f"{name}.norm", (gates.softmax(2) * values).sum(2))
        return self.turn(pooled[:, :, None], torch.arange(count) * stride, stride)[:, :, 0]

    def choice(self, name: str, x: Tensor, low_rank: Tensor, seen: Tensor) -> Tensor:
        config = self.config
        heads, dim = config["index_n_heads"], config["index_head_dim"]
        keys = self.entries(f"{name}.compressor", x, SPARSE_STRIDE, dim)
        q = self.linear(f"{name}.wq_b", low_rank).unflatten(-1, (heads, dim))
        q = self.turn(q, torch.arange(x.shape[1]), SPARSE_STRIDE)
        weights = self.linear(f"{name}.weights_proj", x) * heads**-0.5
        scores = (torch.einsum("bthd,bsd->bths", q, keys).relu() * weights[..., None]).sum(2) * dim**-0.5
        scores = scores.masked_fill(~seen, float("-inf"))
        best = scores.topk(min(config["index_topk"], keys.shape[1]), -1).indices
        return torch.zeros_like(seen).scatter(-1, best, True) & seen

    def turn(self, x: Tensor, places: Tensor, stride: int) -> Tensor:
        """Rotates the last channels of x [B,T,H,d] in neighbouring pairs, by the rope of layers with that stride."""
        config, dim = self.config, self.config["qk_rope_head_dim"]
        if stride:
            frequencies = yarn_frequencies(dim, config["compress_rope_theta"], config["rope_scaling"] or {}, x.dtype)
        else:
            frequencies = config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=x.dtype) / dim)
        angles = (places.to(x.dtype)[:, None] * frequencies)[:, None]
        kept, a, b = x[..., :-dim], x[..., -dim::2], x[..., -dim + 1 :: 2]
        turned = torch.stack([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
        return torch.cat([kept, turned.flatten(-2)], -1)

    def experts(self, name: str, x: Tensor, input_ids: Tensor) -> Tensor:
        config = self.config
        scores = F.softplus(self.linear(f"{name}.gate", x)).sqrt()
        if (table := self.tensors.get(f"{name}.gate.tid2eid")) is not None:
            chosen = table[input_ids].long()
        else:
            chosen = (scores + self.tensors[f"{name}.gate.bias"]).topk(config["num_experts_per_tok"], -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config["routed_scaling_factor"]
        out = self.mlp(f"{name}.shared_experts", x)
        for expert in range(config["n_routed_experts"]):
            weight = (weights * (chosen == expert)).sum(-1, keepdim=True)
            out = out + weight * self.mlp(f"{name}.experts.{expert}", x)
        return out

    def mlp(self, name: str, x: Tensor) -> Tensor:
        limit = self.config["swiglu_limit"]
        gate, up = self.linear(f"{name}.w1", x).clamp(max=limit), self.linear(f"{name}.w3", x).clamp(-limit, limit)
        return self.linear(f"{name}.w2", F.silu(gate) * up)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def unit(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.unit(x) * self.tensors[f"{name}.weight"]


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Published name and shape of every tensor that `DeepSeekV4Reference` reads under this config."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "head.weight": (vocabulary, hidden),
    }
    shapes |= _stream_shapes("hc_head", config, config["hc_mult"], 1)
    for index, stride in enumerate(strides_of(config)[: config["num_hidden_layers"]]):
        shapes |= _layer_shapes(f"layers.{index}", config, stride, hashed=index < config["num_hash_layers"])
    if config.get("num_nextn_predict_layers"):
        shapes |= _layer_shapes("mtp.0", config, 0, hashed=False) | _stream_shapes(
            "mtp.0.hc_head", config, config["hc_mult"], 1
        )
        shapes |= {f"mtp.0.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
        shapes |= {f"mtp.0.{name}.weight": (hidden, hidden) for name in ("e_proj", "h_proj")}
    return shapes


def _stream_shapes(name: str, config: Config, count: int, scales: int) -> dict[str, tuple[int, ...]]:
    width = config["hc_mult"] * config["hidden_size"]
    return {f"{name}_fn": (count, width), f"{name}_base": (count,), f"{name}_scale": (scales,)}


def _layer_shapes(name: str, config: Config, stride: int, hashed: bool) -> dict[str, tuple[int, ...]]:
    hidden, streams, count = config["hidden_size"], config["hc_mult"], config["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.{norm}.weight": (hidden,) for norm in ("attn_norm", "ffn_norm")}
    for part in ("hc_attn", "hc_ffn"):
        shapes |= _stream_shapes(f"{name}.{part}", config, (2 + streams) * streams, 3)
    shapes |= _attention_shapes(f"{name}.attn", config, stride)
    shapes[f"{name}.ffn.gate.weight"] = (count, hidden)
    if hashed:
        shapes[f"{name}.ffn.gate.tid2eid"] = (config["vocab_size"], config["num_experts_per_tok"])
    else:
        shapes[f"{name}.ffn.gate.bias"] = (count,)
    widths = {f"experts.{expert}": config["moe_intermediate_size"] for expert in range(count)}
    widths["shared_experts"] = config["moe_intermediate_size"] * config["n_shared_experts"]
    for part, width in widths.items():
        shapes |= {f"{name}.ffn.{part}.{w}.weight": (width, hidden) for w in ("w1", "w3")}
        shapes[f"{name}.ffn.{part}.w2.weight"] = (hidden, width)
    return shapes


def _attention_shapes(name: str, config: Config, stride: int) -> dict[str, tuple[int, ...]]:
    hidden, dim, low_rank = config["hidden_size"], config["head_dim"], config["q_lora_rank"]
    width, groups, rank = config["num_attention_heads"] * dim, config["o_groups"], config["o_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.wq_a.weight": (low_rank, hidden),
        f"{name}.q_norm.weight": (low_rank,),
        f"{name}.wq_b.weight": (width, low_rank),
        f"{name}.wkv.weight": (dim, hidden),
        f"{name}.kv_norm.weight": (dim,),
        f"{name}.wo_a.weight": (groups * rank, width // groups),
        f"{name}.wo_b.weight": (hidden, groups * rank),
        f"{name}.attn_sink": (config["num_attention_heads"],),
    }
    if stride:
        shapes |= _compressor_shapes(f"{name}.compressor", hidden, dim, stride)
    if stride == SPARSE_STRIDE:
        heads, index_dim = config["index_n_heads"], config["index_head_dim"]
        shapes[f"{name}.indexer.wq_b.weight"] = (heads * index_dim, low_rank)
        shapes[f"{name}.indexer.weights_proj.weight"] = (heads, hidden)
        shapes |= _compressor_shapes(f"{name}.indexer.compressor", hidden, index_dim, stride)
    return shapes


def _compressor_shapes(name: str, hidden: int, dim: int, stride: int) -> dict[str, tuple[int, ...]]:
    width = dim * (2 if stride == SPARSE_STRIDE else 1)
    return {
        f"{name}.wkv.weight": (width, hidden),
        f"{name}.wgate.weight": (width, hidden),
        f"{name}.ape": (stride, width),
        f"{name}.norm.weight": (dim,),
    }


DEEPSEEK_V4_REFERENCE = OwnReference(DeepSeekV4Reference, tensor_shapes)
