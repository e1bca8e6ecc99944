"""What an engine knows of the images in its sequences: the keys they are filed under, and their embeddings.

Everywhere in the engine a sequence is its *keys*: token ids, but for placeholders a negative number that stands for the
still's content and shape and the placeholder's id. So a path of the prefix index, a checkpoint's boundary and a call's
lineage differ from the first token of a differing image on, and whatever a sequence's images change can be told from
its keys alone: positions too. Nothing about images needs to be carried beside them.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, Shaped

from jaxhybrid.layers.step import MediaInputs
from jaxhybrid.media import Frame, Media, Span, place, rope_positions
from jaxhybrid.model import Model

EMBEDDINGS_KEPT = 8  # stills whose embeddings are at hand: a chunk may end inside of one, prompts may share one

Keys = Int32[np.ndarray, "n"]
Frames = Mapping[int, Frame]  # by key


@dataclass(frozen=True)
class _Still:
    content_hash: str
    height: int
    width: int
    token_id: int


@dataclass(frozen=True)
class ChunkRow:
    """One row of a chunk: the keys of a sequence up to the chunk's end, of which those from `start` on are in it."""

    keys: Keys
    start: int
    frames: Frames


class MediaMemory:
    """Of one engine."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._stills: dict[int, _Still] = {}
        self._embedded: OrderedDict[int, Shaped[np.ndarray, "n D"]] = OrderedDict()

    def keyed(self, ids: Keys, media: Sequence[Media]) -> tuple[Keys, dict[int, Frame]]:
        """The prompt's keys, and its stills by key. Raises TokenError as `place` does."""
        keys = ids
        frames: dict[int, Frame] = {}
        for placed in place(ids, media, self._model.config.vision):
            frame, span = placed.frame, placed.span
            key = self._key(_Still(frame.content_hash, span.height, span.width, placed.token_id))
            keys = keys if frames else keys.copy()
            keys[span.start : span.start + span.size] = key
            frames[key] = frame
        return keys, frames

    def _key(self, still: _Still) -> int:
        """31 bits of a hash, so that other processes file it alike; the next free number where another still has it."""
        digest = hashlib.sha256(repr(still).encode()).digest()
        key = -1 - (int.from_bytes(digest[:4], "big") >> 1)
        while self._stills.setdefault(key, still) != still:
            key = key - 1 if key > -(2**31) else -1
        return key

    def token_ids(self, keys: Keys) -> Keys:
        """The ids that keys stand for."""
        at = np.flatnonzero(keys < 0)
        if not at.size:
            return keys
        ids = keys.copy()
        ids[at] = [self._stills[int(key)].token_id for key in keys[at]]
        ids.setflags(write=False)
        return ids

    def spans(self, keys: Keys) -> list[Span]:
        """Where its stills stand; one is cut short where the keys end within it, or a fork went on otherwise there."""
        spans: list[Span] = []
        end = 0
        for start in np.flatnonzero(keys < 0).tolist():
            if start >= end:
                still = self._stills[int(keys[start])]
                whole = Span(start, still.height, still.width)
                others = np.flatnonzero(keys[start : start + whole.size] != keys[start])
                spans.append(replace(whole, cut=int(others[0])) if others.size else whole)
                end = start + spans[-1].size
        return spans

    def offset(self, keys: Keys) -> int:
        """Position minus index of the token after these (the rope delta); 0 without images."""
        if not keys.size or keys.min() >= 0:
            return 0
        return rope_positions(keys.size, self.spans(keys))[1] - keys.size

    def inputs(self, rows: Sequence[ChunkRow], shape: tuple[int, int]) -> MediaInputs | None:
        """What a chunk of that shape needs where stills stand in it; None where none does."""
        if all(row.keys[row.start :].min(initial=0) >= 0 for row in rows):
            return None
        width, dtype = self._model.config.hidden_size, jnp.dtype(self._model.dtypes.cache)
        embeddings, present = np.zeros((*shape, width), dtype), np.zeros(shape, np.bool_)
        positions = np.zeros((3, *shape), np.int32)
        for number, row in enumerate(rows):
            spans = self.spans(row.keys)
            positions[:, number, : row.keys.size - row.start] = rope_positions(row.keys.size, spans)[0][:, row.start :]
            for span in spans:
                first, last = max(span.start, row.start), min(span.start + span.size, row.keys.size)
                if first < last:
                    made = self._embeddings(int(row.keys[span.start]), row.frames)
                    place = number, slice(first - row.start, last - row.start)
                    embeddings[place] = made[first - span.start : last - span.start]
                    present[place] = True
        return MediaInputs(jnp.asarray(embeddings), jnp.asarray(present), jnp.asarray(positions))

    def _embeddings(self, key: int, frames: Frames) -> Shaped[np.ndarray, "n D"]:
        if key not in self._embedded:
            self._embedded[key] = np.asarray(self._model.embed_frame(frames[key]))
        self._embedded.move_to_end(key)
        while len(self._embedded) > EMBEDDINGS_KEPT:
            self._embedded.popitem(last=False)
        return self._embedded[key]
