"""What a vision tower is made of, spelt out."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxhybrid.errors import ConfigError


@dataclass(frozen=True)
class VisionSpec:
    """The tower that makes embeddings of an image's patches, `spatial_merge_size` squared patches a token.

    The defaults are Qwen3-VL's; Kimi K3's MoonViT differs in those.

    `patch_size`, `temporal_patch_size`: pixels and frames a patch spans. `num_position_embeddings`: entries of a square
    table of learned positions, stretched over an image with their corners on its corners (`align_corners`), or with
    their edges on its edges. `image_token_id`, `video_token_id`: what a prompt has in place of each embedding; without
    the latter a model takes no video. `qkv_hidden_size`: of all heads together, if it is not `hidden_size`.
    `norm`: LayerNorm or RMSNorm. `bias`: of every projection. `output_norm_eps`: of an RMSNorm of the embeddings made.
    `preparation`: how pixels become patches (qwen_patches.py, kimi_patches.py).
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    image_token_id: int
    video_token_id: int | None = None
    rope_theta: float = 10000.0
    qkv_hidden_size: int | None = None
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    bias: bool = True
    align_corners: bool = True
    output_norm_eps: float | None = None
    preparation: Literal["qwen", "kimi"] = "qwen"

    def __post_init__(self) -> None:
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ConfigError(f"num_position_embeddings must be a square, got {self.num_position_embeddings}")
        if self.head_dim * self.num_heads != self.attention_size or self.head_dim % 4:
            raise ConfigError(
                f"a tower's heads must have a multiple of 4 channels, got {self.attention_size} for {self.num_heads}"
            )

    @property
    def attention_size(self) -> int:
        return self.qkv_hidden_size or self.hidden_size

    @property
    def head_dim(self) -> int:
        return self.attention_size // self.num_heads

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        video = () if self.video_token_id is None else (self.video_token_id,)
        return (self.image_token_id, *video)

    @property
    def patches_per_token(self) -> int:
        return self.spatial_merge_size**2

    @property
    def patch_features(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2
