"""Where each row of a batch finds its state: the only thing a layer knows of pool and bundles."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchAddress:
    """B rows of T tokens each, of which the first `lengths[b]` are real.

    Row b continues a sequence of `starts[b]` tokens: it reads fixed-size state from `read_slots[b]`, writes it to
    `write_slots[b]`, and finds its token-indexed state in the pages of `page_table[b]`. Slot 0 and page 0 are null:
    they belong to padding. `offsets[b]`: what the images before it add to a token's index to make its position; None
    for a model that takes none.
    """

    starts: Int[Array, " B"]
    lengths: Int[Array, " B"]
    page_table: Int[Array, "B W"]
    read_slots: Int[Array, " B"]
    write_slots: Int[Array, " B"]
    offsets: Int[Array, " B"] | None = None

    def positions(self, steps: int) -> Int[Array, "B T"]:
        return self.starts[:, None] + jnp.arange(steps, dtype=jnp.int32)

    def valid(self, steps: int) -> Bool[Array, "B T"]:
        return jnp.arange(steps, dtype=jnp.int32) < self.lengths[:, None]

    def advance(self) -> "BatchAddress":
        """The address after this step: what was written is read next."""
        return replace(self, starts=self.starts + self.lengths, read_slots=self.write_slots)
