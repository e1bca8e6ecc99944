"""How Qwen2-VL, Qwen3-VL and Qwen3.5 prepare pixels: images are resized to whole tokens, between two limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import UInt8

from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.errors import TokenError
from jaxhybrid.image_patches import PatchRule, mean_and_std, read_preprocessor, resize
from jaxhybrid.vision_spec import VisionSpec

IMAGE_PIXELS = (65536, 16777216)  # least and most, of one image: Qwen3-VL's and Qwen3.5's
VIDEO_PIXELS = (4096, 25165824)  # likewise of all frames of a video together
MAX_ASPECT = 200


@dataclass(frozen=True)
class QwenRule(PatchRule):
    """pixels: least and most of an image; video_pixels: of a video's frames together."""

    pixels: tuple[int, int] = IMAGE_PIXELS
    video_pixels: tuple[int, int] = VIDEO_PIXELS

    @classmethod
    def from_folder(cls, folder: Path, vision: VisionSpec) -> Self:
        read = read_preprocessor(folder)
        sizes = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        for name, size in zip(("patch_size", "temporal_patch_size", "merge_size"), sizes, strict=True):
            read.require(name, size)
        least, most = _pixels(read)
        token = (vision.patch_size * vision.spatial_merge_size) ** 2
        if most < max(least, token):
            needed = f"{max(least, token)} (the least, and a token's) or more"
            raise read.error(f"longest_edge or max_pixels: expected {needed}, got {most}")
        return cls(*sizes, *mean_and_std(read), (least, most))

    def fitted(self, frames: UInt8[np.ndarray, "T h w C"], video: bool) -> UInt8[np.ndarray, "T H W 3"]:
        """Resized to `fitted_size`; opacity is dropped. Raises TokenError."""
        stills = -(-len(frames) // self.temporal_patch_size) if len(frames) > 1 else 1
        limits = self.video_pixels if video else self.pixels
        height, width = fitted_size(frames.shape[1], frames.shape[2], self, limits, stills)
        return np.stack([resize(frame[..., :3], height, width) for frame in frames])


def _pixels(read: ConfigReader) -> tuple[int, int]:
    """Least and most pixels of an image: `size`, whose edges are numbers of pixels, or the older keys beside it."""
    given = [read.take(name, default=None) for name in ("min_pixels", "max_pixels")]
    size = read.take("size", default=None)
    if size is None:
        return given[0] or IMAGE_PIXELS[0], given[1] or IMAGE_PIXELS[1]
    edges = read.within("size", size)
    least, most = edges.take("shortest_edge", "min_pixels"), edges.take("longest_edge", "max_pixels")
    edges.finish()
    if given[0] not in (None, least) or given[1] not in (None, most):
        raise read.error(f"size={size!r} contradicts min_pixels and max_pixels={given!r}")
    return least, most


def fitted_size(height: int, width: int, rule: QwenRule, limits: tuple[int, int], time: int = 1) -> tuple[int, int]:
    """Height and width in pixels, both in whole tokens and all `time` stills' pixels within the limits, near the shape.

    Raises TokenError for sides more than 200 times each other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise TokenError(f"expected sides at most {MAX_ASPECT} times each other, got {height} x {width} pixels")
    unit, frames = rule.patch_size * rule.merge_size, time * (rule.temporal_patch_size if time > 1 else 1)
    fitted = [max(unit, round(side / unit) * unit) for side in (height, width)]
    least, most = limits
    if frames * fitted[0] * fitted[1] > most:
        shrink = math.sqrt(frames * height * width / most)
        fitted = [max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)]
    elif frames * fitted[0] * fitted[1] < least:
        grow = math.sqrt(least / (frames * height * width))
        fitted = [math.ceil(side * grow / unit) * unit for side in (height, width)]
    return fitted[0], fitted[1]


def video_prompt(seconds: Sequence[float], start: str = "<|vision_start|>", end: str = "<|vision_end|>") -> str:
    """The text that stands for a video in a prompt: each still's time, and a placeholder to be expanded.

    seconds: of each still, the mean of its frames' times.
    """
    return "".join(f"<{second:.1f} seconds>{start}<|video_pad|>{end}" for second in seconds)
