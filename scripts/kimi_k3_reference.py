"""A plain torch reference of Kimi K3's text part (arXiv 2607.24653): where it goes other ways than Kimi Linear.

Attention residuals: arXiv 2603.15031. `transformers` has no Kimi K3. Tensors are read under their published names,
experts as what their MXFP4 stands for.
"""

import torch
from golden import Config, Tensors
from golden_references import KimiReference, tensor_shapes
from torch import Tensor

PREFIX = "language_model."


class KimiK3Reference(KimiReference):
    """`config`: of the whole model; `tensors`: all of one floating dtype."""

    def __init__(self, config: Config, tensors: Tensors):
        super().__init__(config["text_config"], {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})
        self.whole = tensors

    def __call__(self, input_ids: Tensor) -> tuple[Tensor, None]:
        """input_ids [B,T] -> logits [B,T,V], no prediction layer."""
        return self.of_embeddings(self.embed(input_ids)), None

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.tensors["model.embed_tokens.weight"][input_ids]

    def of_embeddings(self, running: Tensor) -> Tensor:
        """[B,T,D] -> logits [B,T,V]."""
        blocks: list[Tensor] = []
        for index in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{index}"
            x = self.mixture(f"{name}.self_attention_res", blocks, running) if blocks else running
            if index % self.config["attn_res_block_size"] == 0:
                blocks, running = [*blocks, running], torch.zeros_like(running)
            is_kda = index + 1 in self.config["linear_attn_config"]["kda_layers"]
            mixer = self.kimi_delta_attention if is_kda else self.latent_attention
            running = running + mixer(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
            x = self.mixture(f"{name}.mlp_res", blocks, running)
            x = self.norm(f"{name}.post_attention_layernorm", x)
            is_dense = index < self.config["first_k_dense_replace"]
            out = self.mlp(f"{name}.mlp", x) if is_dense else self.experts(f"{name}.block_sparse_moe", x)
            running = running + out
        x = self.mixture("model.output_attn_res", blocks, running)
        return self.head(self.norm("model.norm", x))

    def mixture(self, name: str, blocks: list[Tensor], running: Tensor) -> Tensor:
        """Softmax over blocks and running sum, scored by a norm and one row."""
        candidates = torch.stack([*blocks, running])
        scores = self.linear(f"{name}_proj", self.norm(f"{name}_norm", candidates))
        return (scores.softmax(0) * candidates).sum(0)

    def log_decay(self, name: str, step: Tensor) -> Tensor:
        options = self.config["linear_attn_config"]
        rate = self.tensors[f"{name}.A_log"][: options["num_heads"], None].exp()
        return options["gate_lower_bound"] * (rate * step).sigmoid()

    def output_gate(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.g_proj", x)

    def experts(self, name: str, x: Tensor) -> Tensor:
        routed = self.routed(name, x, self.linear(f"{name}.routed_expert_down_proj", x))
        if self.config["latent_moe_use_norm"]:
            routed = self.norm(f"{name}.routed_expert_norm", routed)
        return self.linear(f"{name}.routed_expert_up_proj", routed) + self.mlp(f"{name}.shared_experts", x)

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        beta, linear_beta = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        up = linear_beta * torch.tanh(up / linear_beta)
        return beta * torch.tanh(gate / beta) * gate.sigmoid() * up


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Published name and shape of every tensor, experts unquantised."""
    text = config["text_config"]
    hidden, latent, options = text["hidden_size"], text["routed_expert_hidden_size"], text["linear_attn_config"]
    width = options["num_heads"] * options["head_dim"]
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in tensor_shapes(text).items():
        base = name.rsplit(".", 2)[0]
        if name.endswith(("w1.weight", "w3.weight")):
            found[name] = (shape[0], latent)
        elif name.endswith("w2.weight"):
            found[name] = (latent, shape[1])
        elif name.endswith("A_log"):
            found[name] = (options["head_dim"],)
        elif name.endswith("g_a_proj.weight"):
            found[f"{base}.g_proj.weight"] = (width, hidden)
        elif not name.endswith("g_b_proj.weight"):
            found[name] = shape
        if name.endswith("block_sparse_moe.gate.weight"):
            found[f"{base}.routed_expert_down_proj.weight"] = (latent, hidden)
            found[f"{base}.routed_expert_up_proj.weight"] = (hidden, latent)
            if text["latent_moe_use_norm"]:
                found[f"{base}.routed_expert_norm.weight"] = (latent,)
    sites = [f"layers.{index}.{site}" for index in range(text["num_hidden_layers"]) for site in SITES]
    for site in [*sites, "output_attn_res"]:
        found |= {f"model.{site}_norm.weight": (hidden,), f"model.{site}_proj.weight": (1, hidden)}
    return {PREFIX + name: shape for name, shape in found.items()}


SITES = ("self_attention_res", "mlp_res")
