"""Pixels to the patches that a vision tower takes: resized to its grid, normalised, cut up (Qwen2-VL, Qwen3-VL)."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Float, Float32, UInt8

from jaxhybrid.config import VisionSpec
from jaxhybrid.errors import ConfigError, TokenError
from jaxhybrid.media import Media

IMAGE_PIXELS = (65536, 16777216)  # least and most, of one image: Qwen3-VL's and Qwen3.5's
VIDEO_PIXELS = (4096, 25165824)  # likewise of all frames of a video together
MAX_ASPECT = 200
PREPROCESSOR_CONFIG = "preprocessor_config.json"


@dataclass(frozen=True)
class PatchRule:
    """How pixels become patches: the tower's sizes, and what `preprocessor_config.json` says.

    pixels: least and most of an image; video_pixels: of a video's frames together. mean, std: of the three channels,
    in parts of 255.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    pixels: tuple[int, int] = IMAGE_PIXELS
    video_pixels: tuple[int, int] = VIDEO_PIXELS
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @classmethod
    def from_folder(cls, folder: Path, vision: VisionSpec) -> Self:
        """The checkpoint's, or the defaults where it has no such file.

        Raises ConfigError where the file's sizes differ from the tower's.
        """
        sizes = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        file = folder / PREPROCESSOR_CONFIG
        if not file.is_file():
            return cls(*sizes)
        values = json.loads(file.read_text(encoding="utf-8"))
        names = ("patch_size", "temporal_patch_size", "merge_size")
        found = tuple(values.get(name, size) for name, size in zip(names, sizes, strict=True))
        if found != sizes:
            raise ConfigError(f"{file}: patch, temporal patch and merge size are {found}, the model's are {sizes}")
        size = values.get("size") or {}
        least = size.get("shortest_edge", values.get("min_pixels", IMAGE_PIXELS[0]))
        most = size.get("longest_edge", values.get("max_pixels", IMAGE_PIXELS[1]))
        mean, std = (tuple(values.get(name, (0.5, 0.5, 0.5))) for name in ("image_mean", "image_std"))
        return cls(*sizes, (least, most), mean=mean, std=std)


def image_media(pixels: UInt8[np.ndarray, "H W 3"], rule: PatchRule) -> Media:
    """One image. Raises TokenError for other arrays, or sides more than 200 times each other."""
    return _media(pixels[None], rule, rule.pixels)


def video_media(frames: UInt8[np.ndarray, "T H W 3"], rule: PatchRule) -> Media:
    """A video's frames, of which `temporal_patch_size` in a row make one still; the last is repeated to fill up."""
    return _media(frames, rule, rule.video_pixels)


def video_prompt(seconds: Sequence[float], start: str = "<|vision_start|>", end: str = "<|vision_end|>") -> str:
    """The text that stands for a video in a prompt: each still's time, and a placeholder to be expanded.

    seconds: of each still, the mean of its frames' times.
    """
    return "".join(f"<{second:.1f} seconds>{start}<|video_pad|>{end}" for second in seconds)


def read_image(file: str | Path) -> UInt8[np.ndarray, "H W 3"]:
    """An image file's pixels. Needs the extra `vision`."""
    from PIL import Image

    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def _media(frames: UInt8[np.ndarray, "T H W 3"], rule: PatchRule, limits: tuple[int, int]) -> Media:
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise TokenError(f"expected uint8 pixels [height, width, 3] (of each frame), got {frames.dtype} {frames.shape}")
    step = rule.temporal_patch_size
    time = -(-len(frames) // step)
    height, width = fitted_size(frames.shape[1], frames.shape[2], rule, limits, time if len(frames) > 1 else 1)
    resized = np.stack([resize(frame, height, width) for frame in frames])
    mean, std = np.array(rule.mean, np.float32), np.array(rule.std, np.float32)
    scaled = (resized.astype(np.float32) / 255 - mean) / std
    filled = np.concatenate([scaled, np.repeat(scaled[-1:], time * step - len(frames), axis=0)])
    return Media(patchify(filled, rule), (time, height // rule.patch_size, width // rule.patch_size))


def fitted_size(height: int, width: int, rule: PatchRule, limits: tuple[int, int], time: int = 1) -> tuple[int, int]:
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


def resize(pixels: UInt8[np.ndarray, "h w 3"], height: int, width: int) -> UInt8[np.ndarray, "H W 3"]:
    """Bicubic with antialiasing: what Pillow and torchvision call so, up to rounding."""
    if pixels.shape[:2] == (height, width):
        return pixels
    rows, columns = _cubic_weights(pixels.shape[0], height), _cubic_weights(pixels.shape[1], width)
    out = np.einsum("Hh,Ww,hwc->HWc", rows, columns, pixels.astype(np.float32), optimize=True)
    return np.clip(np.round(out), 0, 255).astype(np.uint8)


def _cubic_weights(size: int, target: int) -> Float[np.ndarray, "target size"]:
    """Each row the share of every input pixel in one output pixel: Keys' kernel (a = -1/2), widened when shrinking."""
    scale = size / target
    stretch = max(scale, 1.0)
    centres = (np.arange(target) + 0.5) * scale - 0.5
    x = np.abs(np.arange(size) - centres[:, None]) / stretch
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)


def patchify(frames: Float32[np.ndarray, "T H W 3"], rule: PatchRule) -> Float32[np.ndarray, "N F"]:
    """Frames cut into patches, in the order that `Media` has."""
    size, merge, step = rule.patch_size, rule.merge_size, rule.temporal_patch_size
    time, height, width, channels = frames.shape
    cut = frames.reshape(
        time // step, step, height // size // merge, merge, size, width // size // merge, merge, size, channels
    )
    #     still, row of tokens, column of tokens, row in it, column in it | channel, time, row, column
    order = (0, 2, 5, 3, 6, 8, 1, 4, 7)
    return cut.transpose(order).reshape(-1, channels * step * size * size)
