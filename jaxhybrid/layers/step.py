"""One call's input as every layer sees it: token ids, and where each row's state lies."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Bool, Int

from jaxhybrid.state.batch import BatchAddress


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """B rows of T tokens, padded: row b has `address.lengths[b]` real ones."""

    tokens: Int[Array, "B T"]
    address: BatchAddress

    @property
    def positions(self) -> Int[Array, "B T"]:
        return self.address.positions(self.tokens.shape[1])

    @property
    def valid(self) -> Bool[Array, "B T"]:
        return self.address.valid(self.tokens.shape[1])
