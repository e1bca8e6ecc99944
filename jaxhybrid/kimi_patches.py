"""How Kimi K3 prepares pixels: images keep their size within limits, and are filled up to whole tokens."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Float, UInt8

from jaxhybrid.errors import ConfigError
from jaxhybrid.image_patches import PREPROCESSOR_CONFIG, PatchRule, read_preprocessor, resize
from jaxhybrid.vision_spec import VisionSpec

FILLS = {"black": 0, "gray": 128, "white": 255}


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
        values = read_preprocessor(folder).get("media_proc_cfg", {})
        file = folder / PREPROCESSOR_CONFIG
        sizes = (vision.patch_size, vision.spatial_merge_size)
        found = tuple(
            values.get(name, size) for name, size in zip(("patch_size", "merge_kernel_size"), sizes, strict=True)
        )
        if found != sizes:
            raise ConfigError(f"{file}: patch and merge size are {found}, the model's are {sizes}")
        if (tokens := values.get("fixed_output_tokens")) is not None:
            raise ConfigError(f"{file}: fixed_output_tokens={tokens!r} is not supported, expected None")
        if (stage := values.get("transparent_bg_fill_stage", "after_resize")) != "after_resize":
            raise ConfigError(f"{file}: transparent_bg_fill_stage={stage!r} is not supported, expected 'after_resize'")
        mean, std = (tuple(values.get(name, (0.5, 0.5, 0.5))) for name in ("image_mean", "image_std"))
        return cls(
            vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size, mean, std,
            values.get("in_patch_limit", cls.max_patches), values.get("patch_limit_on_one_side", cls.max_side),
            _background(values.get("transparent_bg_config"), file),
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


def _background(values: dict | None, file: Path) -> Background:
    """`transparent_bg_config`. Raises ConfigError for an unknown pattern."""
    if values is None:
        return Background()
    pattern = values.get("pattern", "black")
    if pattern in FILLS:
        return Background(1, FILLS[pattern], FILLS[pattern])
    if pattern != "chessboard":
        expected = ", ".join([*FILLS, "chessboard"])
        raise ConfigError(f"{file}: transparent_bg_config pattern is {pattern!r}, expected one of {expected}")
    greys = values.get("chessboard_white_value", 255), values.get("chessboard_gray_value", 200)
    first, second = greys if values.get("chessboard_square_on_top_left", True) else greys[::-1]
    return Background(values.get("chessboard_square_size", 16), first, second)


def image_prompt(height: int, width: int) -> str:
    """The text that stands for an image of that many pixels in a prompt, with one placeholder, to be expanded."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"
