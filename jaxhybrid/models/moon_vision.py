"""Kimi K3's vision tower (MoonViT, arXiv 2504.07491) and projector: their config keys and their tensors' names.

The tower turns neighbouring channels together, by the column and by the row in turn. Its query and key rows are put in
the order in which layers/vision.py turns channels, which changes no product of a query and a key.
"""

import numpy as np
from jaxtyping import Int

from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.weight_table import WeightTable, rows
from jaxhybrid.vision_spec import VisionSpec

IN_CHANNELS = 3
# The release names none, and torch's RMSNorm then takes float32's, in which it computes, of bfloat16 inputs too (since
# version 2.7; the bfloat16's own before, 2^-7, which some ports still have).
DEFAULT_EPS = 2.0**-23


def vision_spec(read: ConfigReader, text_hidden_size: int) -> VisionSpec:
    """Takes `vision_config` and the placeholder token of the whole model's config. Raises ConfigError."""
    tower = read.nested("vision_config")
    tower.require("pos_emb_type", "divided_fixed")
    tower.require("pos_emb_interpolation_mode", "bilinear")
    tower.require("norm_type", "rmsnorm")
    tower.require("mlp_type", "mlp2")
    tower.require("activation_func", "gelu_pytorch_tanh")
    tower.require("merge_type", "sd2_tpool")
    tower.require("mm_projector_type", "patchmergerv2")
    tower.require("projector_hidden_act", "gelu")
    for name in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        tower.require(name, False)
    tower.take("init_pos_emb_time")  # positions in time, computed, of the video that the released model does not take
    merge, side = tower.take("merge_kernel_size"), tower.take("init_pos_emb_height")
    tower.require("merge_kernel_size", [merge[0]] * 2, default=merge)
    tower.require("init_pos_emb_width", side)
    width = tower.take("vt_hidden_size")
    tower.require("mm_hidden_size", width)
    tower.require("text_hidden_size", text_hidden_size)
    spec = VisionSpec(
        depth=tower.take("vt_num_hidden_layers"),
        hidden_size=width,
        intermediate_size=tower.take("vt_intermediate_size"),
        num_heads=tower.take("vt_num_attention_heads"),
        in_channels=IN_CHANNELS,
        patch_size=tower.take("patch_size"),
        temporal_patch_size=1,
        spatial_merge_size=merge[0],
        out_hidden_size=text_hidden_size,
        num_position_embeddings=side**2,
        image_token_id=read.take("media_placeholder_token_id"),
        qkv_hidden_size=tower.take("qkv_hidden_size", default=None),
        norm="rms",
        norm_eps=DEFAULT_EPS,
        bias=False,
        align_corners=False,
        output_norm_eps=tower.take("projector_ln_eps"),
        preparation="kimi",
    )
    tower.finish()
    return spec


def vision_weights(table: WeightTable, spec: VisionSpec) -> None:
    """The tower's and the projector's tensors; blocks lie in one stack."""
    tower = "vision_tower.patch_embed"
    patch = (spec.hidden_size, IN_CHANNELS, spec.patch_size, spec.patch_size)
    side = round(spec.num_position_embeddings**0.5)
    table.add(f"{tower}.proj.weight", ("visual", "patch_embed", "weight"), shape=patch)
    table.add(f"{tower}.pos_emb.weight", ("visual", "pos_embed"), shape=(side, side, spec.hidden_size))
    turned = rows(channel_order(spec))
    names = {"norm0": "norm1", "norm1": "norm2", "wo": "proj", "mlp.fc0": "linear_fc1", "mlp.fc1": "linear_fc2"}
    for number in range(spec.depth):
        block = f"vision_tower.encoder.blocks.{number}"
        table.add(f"{block}.wqkv.weight", ("visual", "blocks", "qkv", "weight"), (number,), convert=turned)
        for name, part in names.items():
            table.add(f"{block}.{name}.weight", ("visual", "blocks", part, "weight"), (number,))
    ends = {
        "vision_tower.encoder.final_layernorm": "merger_norm",
        "mm_projector.proj.0": "merger_linear_fc1",
        "mm_projector.proj.2": "merger_linear_fc2",
        "mm_projector.post_norm": "output_norm",
    }
    for name, part in ends.items():
        table.add(f"{name}.weight", ("visual", part, "weight"))


def channel_order(spec: VisionSpec) -> Int[np.ndarray, " rows"]:
    """Which published row of the queries', keys' and values' matrix stands in each place.

    Published pairs of channels (2i, 2i + 1) turn by the column for even i and by the row for odd ones. Here the first
    half of a head has the pairs' first channels, those that turn by the row before the others, the second half their
    second ones. Values stay.
    """
    dim = spec.head_dim
    first = np.concatenate([np.arange(2, dim, 4), np.arange(0, dim, 4)])
    head = np.concatenate([first, first + 1])
    heads = (np.arange(2 * spec.num_heads)[:, None] * dim + head).ravel()
    return np.concatenate([heads, np.arange(2 * spec.attention_size, 3 * spec.attention_size)])
