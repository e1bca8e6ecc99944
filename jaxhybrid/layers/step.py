"""One call's input as every layer sees it: token ids, and where each row's state lies."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxhybrid.state.batch import BatchAddress


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MediaInputs:
    """Images in a call: `embeddings` in place of those tokens that are `present`, and all tokens' three positions."""

    embeddings: Float[Array, "B T D"]
    present: Bool[Array, "B T"]
    positions: Int[Array, "3 B T"]

    def window(self, start: int, steps: int) -> "MediaInputs":
        """Tokens start .. start + steps - 1, padded where there are fewer."""

        def cut(array: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
            part = jax.lax.slice_in_dim(array, start, min(start + steps, array.shape[axis]), axis=axis)
            padding = [(0, 0)] * array.ndim
            padding[axis] = (0, steps - part.shape[axis])
            return jnp.pad(part, padding)

        return MediaInputs(cut(self.embeddings, 1), cut(self.present, 1), cut(self.positions, 2))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """B rows of T tokens, padded: row b has `address.lengths[b]` real ones.

    `repeat`: in a scan over layers, which of them; whole parameters (`WholeParam`) are to be indexed by it.
    """

    tokens: Int[Array, "B T"]
    address: BatchAddress
    media: MediaInputs | None = None
    repeat: Int[Array, ""] | None = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return self.address.positions(self.tokens.shape[1])

    @property
    def rope_positions(self) -> Int[Array, "B T"] | Int[Array, "3 B T"]:
        """Where each token stands for a rotation: beyond its index by its row's offset, or as images have it."""
        if self.media is not None:
            return self.media.positions
        offsets = self.address.offsets
        return self.positions if offsets is None else self.positions + offsets[:, None]

    @property
    def valid(self) -> Bool[Array, "B T"]:
        return self.address.valid(self.tokens.shape[1])
