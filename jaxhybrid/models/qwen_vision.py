"""The vision tower of Qwen3-VL and Qwen3.5: its config keys and its tensors' names."""

from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.models.weight_table import WeightTable
from jaxhybrid.vision_spec import VisionSpec

IN_CHANNELS = 3


def vision_spec(read: ConfigReader) -> VisionSpec:
    """Takes `vision_config` and the placeholder tokens of the whole model's config. Raises ConfigError."""
    tower = read.nested("vision_config")
    tower.take("model_type", default=None)
    tower.require("hidden_act", "gelu_pytorch_tanh")
    tower.require("deepstack_visual_indexes", [])
    tower.require("in_channels", IN_CHANNELS)
    rope = tower.rope()
    rope.require("rope_type", "axial")
    spec = VisionSpec(
        depth=tower.take("depth"),
        hidden_size=tower.take("hidden_size"),
        intermediate_size=tower.take("intermediate_size"),
        num_heads=tower.take("num_heads"),
        in_channels=IN_CHANNELS,
        patch_size=tower.take("patch_size"),
        temporal_patch_size=tower.take("temporal_patch_size"),
        spatial_merge_size=tower.take("spatial_merge_size"),
        out_hidden_size=tower.take("out_hidden_size"),
        num_position_embeddings=tower.take("num_position_embeddings"),
        rope_theta=float(rope.take("rope_theta", default=10000.0)),
        image_token_id=read.take("image_token_id"),
        video_token_id=read.take("video_token_id"),
    )
    rope.finish()
    tower.finish()
    for name in ("vision_start_token_id", "vision_end_token_id"):
        read.take(name, default=None)  # the chat template writes them around an image; they are tokens like others
    return spec


def vision_weights(table: WeightTable, spec: VisionSpec, prefix: str) -> None:
    """The tower's tensors, whose blocks lie in one stack."""

    def both(name: str, *path: str, index: tuple[int, ...] = ()) -> None:
        for kind in ("weight", "bias"):
            table.add(f"{prefix}.{name}.{kind}", ("visual", *path, kind), index)

    patch = (spec.hidden_size, spec.in_channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
    table.add(f"{prefix}.patch_embed.proj.weight", ("visual", "patch_embed", "weight"), shape=patch)
    table.add(f"{prefix}.patch_embed.proj.bias", ("visual", "patch_embed", "bias"))
    table.add(f"{prefix}.pos_embed.weight", ("visual", "pos_embed"))
    for number in range(spec.depth):
        for part in ("norm1", "norm2"):
            both(f"blocks.{number}.{part}", "blocks", part, index=(number,))
        for module, part in (("attn", "qkv"), ("attn", "proj"), ("mlp", "linear_fc1"), ("mlp", "linear_fc2")):
            both(f"blocks.{number}.{module}.{part}", "blocks", part, index=(number,))
    for part in ("norm", "linear_fc1", "linear_fc2"):
        both(f"merger.{part}", f"merger_{part}")
