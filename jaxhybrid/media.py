"""Images and video in a prompt: where they stand, and the positions that their tokens have.

A prompt holds a placeholder token for each embedding that the vision tower makes. Host data only; `image_patches.py`
makes `Media` of pixels.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float32, Int, Int32

from jaxhybrid.errors import TokenError
from jaxhybrid.vision_spec import VisionSpec


@dataclass(frozen=True, eq=False)
class Frame:
    """A still: [height * width, features] patches, those that are merged into one token together."""

    patches: Float32[np.ndarray, "N F"]
    height: int
    width: int

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the patches."""
        return hashlib.sha256(np.ascontiguousarray(self.patches).tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Media:
    """An image, or a video, as the vision tower takes it.

    patches: frame by frame, of each the patches in the order in which they are merged, each the normalised pixels
        [channel, time, row, column] that it spans, flattened.
    grid: (time, height, width) in patches. An image has time 1; each step in time of a video is a still of its own,
        with placeholders of its own in the prompt.

    Raises TokenError where the two do not fit, and for patches that are not finite numbers.
    """

    patches: Float32[np.ndarray, "N F"]
    grid: tuple[int, int, int]

    def __post_init__(self) -> None:
        sides = np.asarray(self.grid)
        if sides.shape != (3,) or not np.issubdtype(sides.dtype, np.integer) or sides.min() < 1:
            raise TokenError(f"expected a grid of (time, height, width) in patches, got {self.grid!r}")
        time, height, width = self.grid
        patches = np.asarray(self.patches)
        if patches.ndim != 2 or patches.shape[0] != time * height * width or not patches.size:
            raise TokenError(f"expected {time} x {height} x {width} patches, got an array of {patches.shape}")
        if not np.issubdtype(patches.dtype, np.floating) or not np.isfinite(patches).all():
            raise TokenError(f"expected patches of finite numbers, got {patches.dtype} or some that are not finite")
        object.__setattr__(self, "patches", np.asarray(patches, np.float32))

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        time, height, width = self.grid
        return tuple(Frame(part, height, width) for part in np.split(self.patches, time))


@dataclass(frozen=True)
class Span:
    """A still's placeholders from token `start` on: `height` rows of `width` tokens, or the first `cut` of them."""

    start: int
    height: int
    width: int
    cut: int | None = None

    @property
    def size(self) -> int:
        return self.height * self.width if self.cut is None else self.cut


@dataclass(frozen=True)
class Placed:
    """A still at its place in a prompt, and the token that stands for it there."""

    span: Span
    frame: Frame
    token_id: int


def place(ids: Int[np.ndarray, " T"], media: Sequence[Media], vision: VisionSpec | None) -> list[Placed]:
    """Matches placeholders to stills, both in order.

    Raises TokenError where one side has more than the other, a still has other patches than the tower takes, or not as
    many placeholders as it makes tokens, and for a video where the model takes images alone.
    """
    if vision is None:
        if media:
            raise TokenError(
                f"expected a prompt of text alone, got {len(media)} images or videos: the model has no vision"
            )
        return []
    waiting = deque(_stills(media, vision))
    placeholders = np.flatnonzero(np.isin(ids, vision.placeholder_ids))
    placed: list[Placed] = []
    at = 0
    while at < placeholders.size:
        start = int(placeholders[at])
        if not waiting:
            raise TokenError(
                f"token {start} is a placeholder, and all {len(placed)} images and frames that came with the tokens "
                f"(media=) stand before it"
            )
        frame = waiting.popleft()
        span = _span(start, frame, vision)
        found = int((ids[start : start + span.size] == ids[start]).sum())
        if found < span.size:
            raise TokenError(
                f"expected {span.size} placeholders from token {start} on for an image of {frame.height} x "
                f"{frame.width} patches, got {found}"
            )
        placed.append(Placed(span, frame, int(ids[start])))
        at += span.size
    if waiting:
        raise TokenError(f"{len(waiting)} images or frames have no placeholder in the prompt")
    return placed


def _stills(media: Sequence[Media], vision: VisionSpec) -> list[Frame]:
    if not isinstance(media, Sequence) or not all(isinstance(item, Media) for item in media):
        raise TokenError(f"expected media as a list of Media, got {type(media).__name__} {media!r:.80}")
    for item in media:
        if item.grid[0] > 1 and vision.video_token_id is None:
            raise TokenError(f"expected images, got a video of {item.grid[0]} stills: the model takes no video")
    return [frame for item in media for frame in item.frames]


def _span(start: int, frame: Frame, vision: VisionSpec) -> Span:
    merge = vision.spatial_merge_size
    if frame.patches.shape[1] != vision.patch_features or frame.height % merge or frame.width % merge:
        raise TokenError(
            f"expected patches of {vision.patch_features} values and sides that divide by {merge}, got "
            f"{frame.height} x {frame.width} patches of {frame.patches.shape[1]}"
        )
    return Span(start, frame.height // merge, frame.width // merge)


def rope_positions(length: int, spans: Sequence[Span]) -> tuple[Int32[np.ndarray, "3 length"], int]:
    """Positions by time, height and width of `length` tokens, and the position of the token after them (Qwen2-VL).

    All three are equal for text and go on by one. A still at position p has time p, height p + row and width
    p + column, and text goes on at p + its longer side; also where `length` cuts it short.
    """
    positions = np.empty((3, length), np.int32)
    at, position = 0, 0
    for span in spans:
        positions[:, at : span.start] = position + np.arange(span.start - at)
        position += span.start - at
        inside = np.arange(min(span.size, length - span.start))
        at = span.start + inside.size
        positions[:, span.start : at] = position
        positions[1, span.start : at] += inside // span.width
        positions[2, span.start : at] += inside % span.width
        position += max(span.height, span.width)
    positions[:, at:] = position + np.arange(length - at)
    return positions, position + length - at


def expand_placeholders(ids: Sequence[int], media: Sequence[Media], vision: VisionSpec) -> list[int]:
    """A prompt with one placeholder for each still, as chat templates write them, to one for each embedding.

    Raises TokenError unless there are as many placeholders as stills, and for a video that the model does not take.
    """
    frames = _stills(media, vision)
    marks = vision.placeholder_ids
    count = sum(token in marks for token in ids)
    if count != len(frames):
        raise TokenError(f"expected a placeholder for each of {len(frames)} images and frames, got {count}")
    waiting = iter(frames)
    expanded: list[int] = []
    for token in ids:
        expanded += [token] * (_span(0, next(waiting), vision).size if token in marks else 1)
    return expanded
