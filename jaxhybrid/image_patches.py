"""Pixels to the patches that a vision tower takes: fitted to whole tokens, normalised, cut up.

How an image is fitted is the model's rule: `qwen_patches.py`, `kimi_patches.py`.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Float, Float32, UInt8

from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.errors import ConfigError, TokenError
from jaxhybrid.media import Media
from jaxhybrid.vision_spec import VisionSpec

PREPROCESSOR_CONFIG = "preprocessor_config.json"
# What is done to every image; resample 3 is bicubic.
STEPS = {"do_resize": True, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}


@dataclass(frozen=True)
class PatchRule(ABC):
    """How pixels become patches: the tower's sizes, and what `preprocessor_config.json` says.

    mean, std: of the three channels, in parts of 255.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @classmethod
    @abstractmethod
    def from_folder(cls, folder: Path, vision: VisionSpec) -> Self:
        """The checkpoint's, or the released model's where it has no such file.

        Raises ConfigError where the file's sizes differ from the tower's, or it asks for what is not implemented.
        """

    @abstractmethod
    def fitted(self, frames: UInt8[np.ndarray, "T h w C"], video: bool) -> UInt8[np.ndarray, "T H W 3"]:
        """Frames with sides of whole tokens; of four channels the last is opacity. Raises TokenError."""


def read_preprocessor(folder: Path) -> ConfigReader:
    """A reader of `preprocessor_config.json`, of nothing where there is none. Raises ConfigError for a broken file."""
    file = folder / PREPROCESSOR_CONFIG
    if not file.is_file():
        return ConfigReader({}, str(file))
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: expected JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected an object, got {type(values).__name__}")
    return ConfigReader(values, str(file))


def mean_and_std(read: ConfigReader) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Takes `image_mean` and `image_std`. Raises ConfigError where a step is left out or done otherwise."""
    for name, value in STEPS.items():
        read.require(name, value, None)
    mean, std = (tuple(read.take(name, default=[0.5, 0.5, 0.5])) for name in ("image_mean", "image_std"))
    return mean, std


def image_media(pixels: UInt8[np.ndarray, "H W C"], rule: PatchRule) -> Media:
    """One image, of 3 channels, or 4 with opacity. Raises TokenError for other arrays, and what the rule refuses."""
    return _media(np.asarray(pixels)[None], rule, video=False)


def video_media(frames: UInt8[np.ndarray, "T H W 3"], rule: PatchRule) -> Media:
    """A video's frames, of which `temporal_patch_size` in a row make one still; the last is repeated to fill up."""
    return _media(np.asarray(frames), rule, video=True)


def read_image(file: str | Path) -> UInt8[np.ndarray, "H W C"]:
    """An image file's pixels, upright as its EXIF data say, with opacity if it has any. Needs the extra `vision`.

    Raises TokenError for a file that is missing, no image, of more pixels than Pillow takes to be safe, or of 32 bits
    a colour.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode in ("F", "I"):
                raise TokenError(f"{file}: expected at most 16 bits a colour, got 32, of unknown white")
            if image.mode.startswith("I;16"):  # Pillow would clip and not scale
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            return np.asarray(image.convert("RGBA" if image.has_transparency_data else "RGB"))
    except (Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise TokenError(f"{file}: expected an image: {error}") from error


def _media(frames: UInt8[np.ndarray, "T H W C"], rule: PatchRule, video: bool) -> Media:
    if frames.ndim != 4 or frames.shape[3] not in (3, 4) or frames.dtype != np.uint8 or not frames.size:
        shape = frames.shape if video else frames.shape[1:]
        raise TokenError(f"expected uint8 pixels [height, width, 3 or 4] (of each frame), got {frames.dtype} {shape}")
    fitted = rule.fitted(frames, video)
    mean, std = np.array(rule.mean, np.float32), np.array(rule.std, np.float32)
    scaled = (fitted.astype(np.float32) / 255 - mean) / std
    missing = -len(frames) % rule.temporal_patch_size
    filled = np.concatenate([scaled, np.repeat(scaled[-1:], missing, axis=0)])
    height, width = (side // rule.patch_size for side in fitted.shape[1:3])
    return Media(patchify(filled, rule), (len(filled) // rule.temporal_patch_size, height, width))


def resize(pixels: UInt8[np.ndarray, "h w C"], height: int, width: int) -> UInt8[np.ndarray, "H W C"]:
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
