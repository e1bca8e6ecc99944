"""How Kimi K3 prepares pixels: images keep their size within limits, and are filled up to whole tokens."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Float, UInt8

from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.image_patches import STEPS, PatchRule, mean_and_std, read_preprocessor, resize
from jaxhybrid.vision_spec import VisionSpec

FILLS = {"black": 0, "gray": 128, "white": 255}
OPTIONS = (
    "patch_size", "merge_kernel_size", "image_mean", "image_std", "in_patch_limit", "patch_limit_on_one_side",
    "fixed_output_tokens", "transparent_bg_config", "transparent_bg_fill_stage",
)  # fmt: skip


@dataclass(frozen=True)
class Background:
    """What shows through where an image is transparent: squares of two greys, or one."""

    square_size: int = 8
    first: int = 255
    second: int = 180

    def pixels(self, height: int, width: int) -> Float[np.ndarray, "H W 1"]:
        rows, columns = np.indices((height, width)) // self.square_size
        return np.where((rows + columns) % 2 == 0, self.first, self.second)[..., None].astype(np.float32)


@dataclass(frozen=True)
class KimiRule(PatchRule):
    """max_patches: of an image; max_side: of each of its sides, in patches."""

    max_patches: int = 65536
    max_side: int = 512
    background: Background = Background()

    @classmethod
    def from_folder(cls, folder: Path, vision: VisionSpec) -> Self:
        read = _options(read_preprocessor(folder))
        patch, merge = vision.patch_size, vision.spatial_merge_size
        read.require("patch_size", patch)
        read.require("merge_kernel_size", merge, [merge, merge])
        read.require("fixed_output_tokens", None)
        read.require("transparent_bg_fill_stage", "after_resize")
        return cls(
            patch, vision.temporal_patch_size, merge, *mean_and_std(read),
            max_patches=read.take("in_patch_limit", default=cls.max_patches),
            max_side=read.take("patch_limit_on_one_side", default=cls.max_side),
            background=_background(read),
        )  # fmt: skip

    def fitted(self, frames: UInt8[np.ndarray, "T h w C"], video: bool) -> UInt8[np.ndarray, "T H W 3"]:
        """Shrunk to the limits if need be, and black on the right and at the bottom up to whole tokens."""
        height, width = self.shrunk_size(*frames.shape[1:3])
        unit = self.patch_size * self.merge_size
        shrunk = np.stack([self._opaque(frame, height, width) for frame in frames])
        return np.pad(shrunk, ((0, 0), (0, -height % unit), (0, -width % unit), (0, 0)))

    def shrunk_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels, near the shape, within the limits."""
        longest = self.max_side * self.patch_size
        patches = max(1, height // self.patch_size) * max(1, width // self.patch_size)
        scale = min(1.0, math.sqrt(self.max_patches / patches), longest / height, longest / width)
        return min(longest, max(1, int(height * scale))), min(longest, max(1, int(width * scale)))

    def _opaque(self, frame: UInt8[np.ndarray, "h w C"], height: int, width: int) -> UInt8[np.ndarray, "H W 3"]:
        """The frame resized, over the background where it is transparent."""
        if frame.shape[2] == 3:
            return resize(frame, height, width)
        # Colours count by their opacity while they are mixed, or hidden ones would bleed into seen ones.
        share = frame[..., 3:].astype(np.float32) / 255
        weighted = np.round(frame[..., :3] * share).astype(np.uint8)
        resized = resize(np.concatenate([weighted, frame[..., 3:]], axis=-1), height, width).astype(np.float32)
        behind = self.background.pixels(height, width) * (1 - resized[..., 3:] / 255)
        return np.clip(resized[..., :3] + behind, 0, 255).astype(np.uint8)


def _options(whole: ConfigReader) -> ConfigReader:
    """What `media_proc_cfg` holds, and what stands beside it: there a processor puts it when it is saved again."""
    if "media_proc_cfg" not in whole:
        return whole
    read = whole.nested("media_proc_cfg")
    for name in (*OPTIONS, *STEPS):
        read.agree(whole, name)
    return read


def _background(read: ConfigReader) -> Background:
    """Takes `transparent_bg_config`. Raises ConfigError for an unknown pattern."""
    values = read.take("transparent_bg_config", default=None)
    if values is None:
        return Background()
    inner = read.within("transparent_bg_config", values)
    pattern = inner.take("pattern", default="black")
    if pattern in FILLS:
        return Background(1, FILLS[pattern], FILLS[pattern])
    if pattern != "chessboard":
        raise inner.error(f"pattern is {pattern!r}, expected one of {', '.join([*FILLS, 'chessboard'])}")
    greys = inner.take("chessboard_white_value", default=255), inner.take("chessboard_gray_value", default=200)
    first, second = greys if inner.take("chessboard_square_on_top_left", default=True) else greys[::-1]
    return Background(inner.take("chessboard_square_size", default=16), first, second)


def image_prompt(height: int, width: int) -> str:
    """The text that stands for an image of that many pixels in a prompt, with one placeholder, to be expanded."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"
