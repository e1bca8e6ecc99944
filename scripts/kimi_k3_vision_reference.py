"""Kimi K3's tower for images, made of transformers' Kimi K2.5 with what K3's config and tensors say is different.

Different are: RMSNorm for LayerNorm, no biases, heads that together are wider than the tower, positions read
bilinearly, and a projector that normalises what it made instead of what it was given.
"""

from typing import Any

import torch
from golden import Config, Tensors
from golden_images import IMAGES, TEXT, greedy
from kimi_k3_reference import KimiK3Reference
from torch import Tensor, nn

TOWER = "vision_tower."


class KimiK3Tower(nn.Module):
    """patches [P, 3, size, size] of images and grids [N, 3] -> embeddings [M, D] of their tokens."""

    def __init__(self, config: Config, tensors: Tensors):
        super().__init__()
        from transformers import Kimi_K25VisionConfig
        from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

        vision = config["vision_config"]
        width, inner, heads = vision["vt_hidden_size"], vision["qkv_hidden_size"], vision["vt_num_attention_heads"]
        options = Kimi_K25VisionConfig(
            patch_size=vision["patch_size"], pos_emb_height=vision["init_pos_emb_height"],
            pos_emb_width=vision["init_pos_emb_width"], pos_emb_time=vision["init_pos_emb_time"],
            num_attention_heads=heads, num_hidden_layers=vision["vt_num_hidden_layers"], hidden_size=heads * 4,
            intermediate_size=vision["vt_intermediate_size"], merge_kernel_size=vision["merge_kernel_size"],
        )  # fmt: skip
        options.hidden_size, options.head_dim = width, inner // heads  # K2.5 ties the two to each other
        options._attn_implementation = "eager"
        tower = Kimi_K25VisionModel(options)
        tower.patch_embed.proj = nn.Conv2d(3, width, vision["patch_size"], vision["patch_size"], bias=False)
        tower.patch_embed.pos_emb.interpolation_mode = vision["pos_emb_interpolation_mode"]
        for layer in tower.layers:
            layer.norm1, layer.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            layer.mlp.fc1 = nn.Linear(width, vision["vt_intermediate_size"], bias=False)
            layer.mlp.fc2 = nn.Linear(vision["vt_intermediate_size"], width, bias=False)
            layer.attn.head_dim, layer.attn.scaling = inner // heads, (inner // heads) ** -0.5
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(layer.attn, name, nn.Linear(width, inner, bias=False))
            layer.attn.proj = nn.Linear(inner, width, bias=False)
        tower.final_layernorm = nn.RMSNorm(width)
        merged, hidden = width * vision["merge_kernel_size"][0] ** 2, vision["text_hidden_size"]
        self.tower = tower
        self.proj = nn.Sequential(
            nn.Linear(merged, merged, bias=False), nn.GELU(), nn.Linear(merged, hidden, bias=False)
        )
        self.post_norm = nn.RMSNorm(hidden, eps=vision["projector_ln_eps"])
        self.load_state_dict(loaded_names(tensors, heads))

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        merged = self.tower(patches, grids).pooler_output
        return self.post_norm(self.proj(merged.flatten(1)))


def loaded_names(tensors: Tensors, heads: int) -> Tensors:
    """Published tensors under transformers' names, whose heads turn channels i and i + d / 2, not 2i and 2i + 1."""
    named: Tensors = {}
    rename = {
        "encoder.": "", "blocks.": "layers.", "norm1": "norm2", "norm0": "norm1", "mlp.fc1": "mlp.fc2",
        "mlp.fc0": "mlp.fc1", ".wo.": ".attn.proj.", "pos_emb.weight": "pos_emb.position_embeddings",
    }  # fmt: skip
    for name, tensor in tensors.items():
        if name.startswith("mm_projector."):
            named[name.removeprefix("mm_projector.")] = tensor
        if not name.startswith(TOWER):
            continue
        base = name.removeprefix(TOWER)
        for old, new in rename.items():
            base = base.replace(old, new)
        if ".wqkv." not in base:
            named[f"tower.{base}"] = tensor
            continue
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            if part != "v":
                rows = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            named["tower." + base.replace("wqkv", f"attn.{part}_proj")] = rows
    return named


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Published name and shape of every tensor of the tower and the projector."""
    vision = config["vision_config"]
    width, inner, wide = vision["vt_hidden_size"], vision["qkv_hidden_size"], vision["vt_intermediate_size"]
    size, merged = vision["patch_size"], width * vision["merge_kernel_size"][0] ** 2
    found: dict[str, tuple[int, ...]] = {
        f"{TOWER}patch_embed.proj.weight": (width, 3, size, size),
        f"{TOWER}patch_embed.pos_emb.weight": (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width),
        f"{TOWER}encoder.final_layernorm.weight": (width,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (vision["text_hidden_size"], merged),
        "mm_projector.post_norm.weight": (vision["text_hidden_size"],),
    }
    block = {
        "norm0": (width,), "norm1": (width,), "wqkv": (3 * inner, width), "wo": (width, inner),
        "mlp.fc0": (wide, width), "mlp.fc1": (width, wide),
    }  # fmt: skip
    for number in range(vision["vt_num_hidden_layers"]):
        found |= {f"{TOWER}encoder.blocks.{number}.{name}.weight": shape for name, shape in block.items()}
    return found


def image_arrays(reference: KimiK3Reference, config: Config, seed: int) -> dict[str, Any] | None:
    """One prompt with two images: the arrays of golden_images.image_arrays but for positions and sizes of pixels.

    None if a greedy step is nearly tied.
    """
    generator = torch.Generator().manual_seed(seed)
    vision, merge = config["vision_config"], config["vision_config"]["merge_kernel_size"][0]
    tower = KimiK3Tower(config, {name: tensor.float() for name, tensor in reference.whole.items()})
    grids = torch.tensor(IMAGES)
    patches = torch.randn(int(grids.prod(-1).sum()), 3, *[vision["patch_size"]] * 2, generator=generator)
    embeddings = tower(patches, grids)
    mark = config["media_placeholder_token_id"]
    ids: list[int] = []
    for _, height, width in IMAGES:
        ids += torch.randint(5, config["text_config"]["vocab_size"], (TEXT,), generator=generator).tolist()
        ids += [3, *[mark] * (height * width // merge**2), 4]
    ids += torch.randint(5, config["text_config"]["vocab_size"], (TEXT,), generator=generator).tolist()
    places = torch.tensor(ids) == mark

    def logits_of(tokens: Tensor) -> Tensor:
        embedded = reference.embed(tokens)
        embedded[0, : len(ids)][places] = embeddings
        return reference.of_embeddings(embedded)[0]

    continued = greedy(logits_of, ids)
    if continued is None:
        return None
    logits, chosen, decoded = continued
    arrays = {
        "input_ids": torch.tensor(ids).int(), "patches": by_token(patches, grids, merge), "grids": grids.int(),
        "embeddings": embeddings, "logits": logits, "greedy": chosen.int(), "decode": decoded,
    }  # fmt: skip
    return {f"vl_{name}": array.detach().numpy() for name, array in arrays.items()}


def by_token(patches: Tensor, grids: Tensor, merge: int) -> Tensor:
    """Patches [P, 3, size, size] of images row by row, as [P, F] with those of a token together."""
    parts = patches.flatten(1).split(grids.prod(-1).tolist())
    return torch.cat(
        [
            part.unflatten(0, (height // merge, merge, width // merge, merge)).transpose(1, 2).flatten(0, 3)
            for part, (_, height, width) in zip(parts, grids.tolist(), strict=True)
        ]
    )
