"""Kimi K3's images: sizes kept and filled up, limits, what is transparent, and the folder's options."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxhybrid.errors import ConfigError
from jaxhybrid.image_patches import image_media, resize
from jaxhybrid.kimi_patches import Background, KimiRule, image_prompt
from jaxhybrid.vision_spec import VisionSpec

VISION = VisionSpec(1, 8, 8, 1, 3, 3, 1, 2, 8, 4, 0, preparation="kimi")  # patches of 3 pixels, 2 x 2 to a token
RULE = KimiRule(3, 1, 2, max_patches=40, max_side=9)


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def test_an_image_keeps_its_size_and_is_filled_up_with_black() -> None:
    image = pixels(13, 16, 3)
    media = image_media(image, RULE)
    assert media.grid == (1, 6, 6)
    filled = RULE.fitted(image[None], video=False)[0]
    assert filled.shape == (18, 18, 3)
    assert np.array_equal(filled[:13, :16], image)
    assert not filled[13:].any()
    assert not filled[:, 16:].any()
    # The third patch is the first of the token's second row.
    expected = filled[3:6, :3].astype(np.float32) / 255 * 2 - 1
    assert np.allclose(media.patches[2].reshape(3, 3, 3), expected.transpose(2, 0, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((13, 16), (13, 16)),
        ((60, 24), (27, 10)),  # 20 x 8 patches, of which 40 are a quarter: 30 x 12, and then a side of 9 patches
        ((40, 36), (20, 18)),  # 13 x 12 patches, 40 are (1 / 1.975)^2 of them
        ((2, 300), (1, 27)),
        ((1, 1), (1, 1)),
    ],
)
def test_sizes_within_the_limits(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert RULE.shrunk_size(*size) == expected


def test_what_is_transparent_shows_squares() -> None:
    clear = pixels(12, 18, 4)
    clear[..., 3] = 0
    shown = RULE.fitted(clear[None], video=False)[0]
    assert shown.shape == (12, 18, 3)
    assert {tuple(shown[0, 0]), tuple(shown[8, 8]), tuple(shown[7, 7])} == {(255, 255, 255)}
    assert {tuple(shown[0, 8]), tuple(shown[8, 7]), tuple(shown[7, 15])} == {(180, 180, 180)}
    half = clear.copy()
    half[..., :3], half[..., 3] = 100, 51  # a fifth opaque
    assert tuple(RULE.fitted(half[None], video=False)[0, 0, 0]) == (224, 224, 224)
    clear[..., 3] = 255
    assert np.array_equal(RULE.fitted(clear[None], video=False)[0], clear[..., :3])


def test_shrunk_transparent_images_are_as_pillow_makes_them() -> None:
    """Pillow mixes colours by their opacity too; rounding apart."""
    image = pixels(60, 24, 4)
    background = Background(4, 250, 90)
    rule = KimiRule(3, 1, 2, max_patches=40, max_side=9, background=background)
    made = rule.fitted(image[None], video=False)[0, :27, :10].astype(int)
    resized = np.asarray(Image.fromarray(image).resize((10, 27), Image.Resampling.BICUBIC)).astype(np.float64)
    share = resized[..., 3:] / 255
    expected = (resized[..., :3] * share + background.pixels(27, 10) * (1 - share)).astype(np.uint8).astype(int)
    assert np.abs(made - expected).max() <= 3
    assert np.abs(made - expected).mean() < 0.6
    assert np.abs(made - resize(image[..., :3], 27, 10)).max() > 30


def test_rules_of_a_folder(tmp_path: Path) -> None:
    assert KimiRule.from_folder(tmp_path, VISION) == KimiRule(3, 1, 2, max_patches=65536, max_side=512)
    file = tmp_path / "preprocessor_config.json"

    def rule(**values: object) -> KimiRule:
        file.write_text(json.dumps({"media_proc_cfg": {"patch_size": 3, "merge_kernel_size": 2} | values}))
        return KimiRule.from_folder(tmp_path, VISION)

    read = rule(in_patch_limit=50, patch_limit_on_one_side=7, image_mean=[0.1, 0.2, 0.3], fixed_output_tokens=None)
    assert (read.max_patches, read.max_side, read.mean, read.std) == (50, 7, (0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    squares = {"pattern": "chessboard", "chessboard_square_size": 5, "chessboard_square_on_top_left": False}
    assert rule(transparent_bg_config=squares).background == Background(5, 200, 255)
    assert rule(transparent_bg_config={"pattern": "gray"}).background == Background(1, 128, 128)
    for values, message in (
        ({"patch_size": 14}, "patch_size=14 is not supported, expected 3"),
        ({"merge_kernel_size": [2, 3]}, "merge_kernel_size=[2, 3] is not supported, expected 2 or [2, 2]"),
        ({"fixed_output_tokens": 64}, "fixed_output_tokens=64 is not supported"),
        ({"transparent_bg_fill_stage": "before_resize"}, "expected 'after_resize'"),
        ({"transparent_bg_config": "black"}, "transparent_bg_config: expected an object or null, got 'black'"),
        ({"transparent_bg_config": {"pattern": []}}, "transparent_bg_config: pattern: expected a string, got []"),
        ({"transparent_bg_config": {"pattern": "dots"}}, "pattern is 'dots', expected one of black, gray, white, ch"),
        ({"transparent_bg_config": squares | {"chessboard_square_size": 0}}, "square_size: expected an integer from 1"),
        ({"transparent_bg_config": squares | {"chessboard_gray_value": 999}}, "expected an integer from 0 to 255"),
        ({"image_mean": [0.5] * 4}, "image_mean: expected a list of three numbers, got [0.5, 0.5, 0.5, 0.5]"),
        ({"in_patch_limit": 0}, "in_patch_limit: expected an integer from 1 to 2147483647, got 0"),
        ({"patch_limit_on_one_side": None}, "patch_limit_on_one_side: expected an integer from 1"),
        ({"do_normalize": False}, "do_normalize=False is not supported"),
    ):
        with pytest.raises(ConfigError, match=f"{re.escape(f'{file}: media_proc_cfg: ')}.*{re.escape(message)}"):
            rule(**values)


def test_options_may_stand_beside_the_others(tmp_path: Path) -> None:
    """A processor that is saved again may write them there; both places must say the same."""
    file = tmp_path / "preprocessor_config.json"

    def rule(values: object) -> KimiRule:
        file.write_text(json.dumps(values))
        return KimiRule.from_folder(tmp_path, VISION)

    whole = rule({"in_patch_limit": 50, "merge_kernel_size": [2, 2], "image_std": [0.1, 0.2, 0.3]})
    assert (whole.max_patches, whole.std) == (50, (0.1, 0.2, 0.3))
    assert rule({"in_patch_limit": 50, "media_proc_cfg": {"image_std": [0.1, 0.2, 0.3]}}) == whole
    with pytest.raises(ConfigError, match="in_patch_limit=40 contradicts 50 outside of it"):
        rule({"in_patch_limit": 50, "media_proc_cfg": {"in_patch_limit": 40}})
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json: patch_size=99 is not supported, expected 3"):
        rule({"patch_size": 99})
    with pytest.raises(ConfigError, match="media_proc_cfg: expected an object, got None"):
        rule({"media_proc_cfg": None})


def test_the_text_that_stands_for_an_image() -> None:
    assert image_prompt(480, 640) == "<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>"
