"""Pixels to patches: sizes, resizing, normalising, and the order of patches."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxhybrid.errors import ConfigError, TokenError
from jaxhybrid.image_patches import image_media, patchify, read_image, resize, video_media
from jaxhybrid.qwen_patches import QwenRule, fitted_size, video_prompt
from jaxhybrid.vision_spec import VisionSpec

GOLDENS = Path(__file__).parent / "goldens"
RULE = QwenRule(patch_size=3, temporal_patch_size=2, merge_size=2, pixels=(72, 1296), video_pixels=(72, 2592))
VISION = VisionSpec(1, 8, 8, 1, 3, 3, 2, 2, 8, 4, 0, 1)  # patches of 3 pixels and 2 frames, 2 x 2 to a token


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def test_resizing_equals_the_reference() -> None:
    """Rounding apart: the reference's bicubic, with antialiasing, enlarging one side and shrinking the other."""
    with np.load(GOLDENS / "qwen3_5_vl" / "golden.npz") as arrays:
        source, expected = arrays["vl_pixels"], arrays["vl_resized"]
    made = resize(source, *expected.shape[:2])
    assert np.abs(made.astype(int) - expected.astype(int)).max() <= 1
    assert (made == expected).mean() > 0.99
    assert resize(source, *source.shape[:2]) is source


def test_patches_lie_in_the_order_of_tokens() -> None:
    """Against the definition, patch by patch."""
    frames = np.random.default_rng(1).normal(size=(4, 12, 18, 3)).astype(np.float32)
    patches = patchify(frames, RULE)
    assert patches.shape == (2 * 4 * 6, 3 * 2 * 3 * 3)
    number = 0
    for still in range(2):
        for token_row, token_column, row, column in np.ndindex(2, 3, 2, 2):
            top, left = 3 * (2 * token_row + row), 3 * (2 * token_column + column)
            part = frames[2 * still : 2 * still + 2, top : top + 3, left : left + 3]
            assert np.array_equal(patches[number], part.transpose(3, 0, 1, 2).ravel())
            number += 1


@pytest.mark.parametrize(
    ("height", "width", "expected"), [(30, 18, (30, 18)), (31, 20, (30, 18)), (3, 5, (12, 12)), (60, 90, (24, 42))]
)
def test_sizes_are_whole_tokens_within_the_limits(height: int, width: int, expected: tuple[int, int]) -> None:
    assert fitted_size(height, width, RULE, RULE.pixels) == expected


def test_an_image_is_two_equal_frames() -> None:
    image = pixels(12, 18, 3)
    media = image_media(image, RULE)
    assert media.grid == (1, 4, 6)
    scaled = (image[:3, :3].astype(np.float32) / 255 - 0.5) / 0.5
    assert np.allclose(media.patches[0].reshape(3, 2, 3, 3), scaled.transpose(2, 0, 1)[:, None], atol=1e-6)


def test_a_video_is_its_stills() -> None:
    frames = pixels(3, 12, 18, 3)
    media = video_media(frames, RULE)
    assert media.grid == (2, 4, 6)
    assert [(frame.height, frame.width) for frame in media.frames] == [(4, 6), (4, 6)]
    assert media.frames[0].content_hash != media.frames[1].content_hash
    # The last frame is there twice, as an image's is.
    assert np.array_equal(media.frames[1].patches, image_media(frames[2], RULE).patches)
    still = "<|vision_start|><|video_pad|><|vision_end|>"
    assert video_prompt([0.25, 1.3]) == f"<0.2 seconds>{still}<1.3 seconds>{still}"


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(TokenError, match="expected uint8 pixels"):
        image_media(pixels(12, 18, 2), RULE)
    with pytest.raises(TokenError, match="expected uint8 pixels"):
        image_media(np.zeros((12, 18, 3), np.float32), RULE)
    with pytest.raises(TokenError, match="at most 200 times each other, got 1 x 201 pixels"):
        image_media(pixels(1, 201, 3), RULE)


def test_rules_of_a_folder(tmp_path: Path) -> None:
    assert QwenRule.from_folder(tmp_path, VISION).pixels == (65536, 16777216)
    file = tmp_path / "preprocessor_config.json"
    values = {
        "size": {"shortest_edge": 99, "longest_edge": 999}, "patch_size": 3, "merge_size": 2,
        "image_mean": [0.1, 0.2, 0.3],
    }  # fmt: skip
    file.write_text(json.dumps(values))
    rule = QwenRule.from_folder(tmp_path, VISION)
    assert (rule.pixels, rule.mean, rule.std) == ((99, 999), (0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    file.write_text(json.dumps(values | {"patch_size": 14}))
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json: patch_size=14 is not supported, expected 3"):
        QwenRule.from_folder(tmp_path, VISION)
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json: expected JSON"):
        QwenRule.from_folder(tmp_path, VISION)
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json: expected an object, got list"):
        QwenRule.from_folder(tmp_path, VISION)


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ({"min_pixels": 36, "max_pixels": 144}, (36, 144)),
        ({"min_pixels": None, "max_pixels": None, "size": None}, (65536, 16777216)),
        ({"size": {"min_pixels": 36, "max_pixels": 36}}, (36, 36)),
        ({"size": {"shortest_edge": 40, "longest_edge": 99}, "min_pixels": 40, "max_pixels": None}, (40, 99)),
    ],
)
def test_limits_of_pixels_are_spelt_in_several_ways(values: dict, limits: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    assert QwenRule.from_folder(tmp_path, VISION).pixels == limits


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 5}, "size: expected an object or null, got 5"),
        ({"size": {"height": 12, "width": 12}}, "size: expected key 'shortest_edge' or 'min_pixels', found none"),
        ({"size": {"shortest_edge": 9, "longest_edge": 99, "height": 3}}, "size: unknown keys height"),
        ({"size": {"shortest_edge": "56"}}, "size: shortest_edge: expected an integer from 1 to 2147483647, got '56'"),
        ({"size": {"shortest_edge": 9, "longest_edge": 0}}, "size: longest_edge: expected an integer from 1"),
        ({"size": {"shortest_edge": 9, "longest_edge": 99}, "min_pixels": 8}, "contradicts min_pixels and max_pixels="),
        (
            {"min_pixels": 100, "max_pixels": 99},
            "longest_edge or max_pixels: expected 100 (the least, and a",
        ),
        ({"min_pixels": 9, "max_pixels": 35}, "longest_edge or max_pixels: expected 36 (the least, and a"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std: expected a list of three numbers above 0, got [0.5, 0, 0.5]"),
        ({"image_mean": None}, "image_mean: expected a list of three numbers, got None"),
        ({"do_resize": False}, "do_resize=False is not supported, expected True"),
        ({"resample": 0}, "resample=0 is not supported, expected 3"),
        ({"do_rescale": False}, "do_rescale=False is not supported, expected True"),
        ({"rescale_factor": 1.0}, "rescale_factor=1.0 is not supported, expected 0.0039"),
        ({"do_normalize": False}, "do_normalize=False is not supported, expected True"),
    ],
)
def test_wrong_values_of_a_folder_are_refused(values: dict, message: str, tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"{re.escape(f'{file}: ')}.*{re.escape(message)}"):
        QwenRule.from_folder(tmp_path, VISION)


def test_image_files_are_read_with_their_opacity(tmp_path: Path) -> None:
    opaque, clear = pixels(5, 7, 3), pixels(5, 7, 4)
    for name, array in (("opaque.png", opaque), ("clear.png", clear)):
        Image.fromarray(array).save(tmp_path / name)
        assert np.array_equal(read_image(tmp_path / name), array)
    assert np.array_equal(image_media(clear, RULE).patches, image_media(clear[..., :3], RULE).patches)
    deep = np.array([[0, 255, 256], [2000, 32768, 65535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert np.array_equal(read_image(tmp_path / "deep.png")[..., 0], deep >> 8)
    turned = Image.fromarray(opaque)
    exif = turned.getexif()
    exif[0x0112] = 6  # a camera held upright
    turned.save(tmp_path / "turned.jpeg", exif=exif)
    assert read_image(tmp_path / "turned.jpeg").shape == (7, 5, 3)
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "floats.tiff")
    with pytest.raises(TokenError, match=r"floats\.tiff: expected at most 16 bits a colour, got 32"):
        read_image(tmp_path / "floats.tiff")
    (tmp_path / "text.png").write_text("text")
    for name in ("text.png", "absent.png"):
        with pytest.raises(TokenError, match=rf"{name}: expected an image"):
            read_image(tmp_path / name)


def test_an_image_of_too_many_pixels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(pixels(9, 9, 3)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    with pytest.raises(TokenError, match=r"large\.png: expected an image: .*decompression bomb"):
        read_image(tmp_path / "large.png")
