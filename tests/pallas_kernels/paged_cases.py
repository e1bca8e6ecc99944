"""Pages and page tables for the interpreted kernels of the attention operators."""

import jax.numpy as jnp
import numpy as np


class PagedCase:
    """Rows of a few sequences in pages out of order, NaN wherever no token is."""

    def __init__(self, starts, lengths, tokens, page, width, layers=2, seed=0):
        self.rng = np.random.default_rng(seed)
        self.starts, self.lengths = np.asarray(starts, np.int32), np.asarray(lengths, np.int32)
        self.batch, self.tokens, self.page, self.layers = len(starts), tokens, page, layers
        table = self.rng.permutation(np.arange(1, 1 + self.batch * width)).reshape(self.batch, width)
        table[np.arange(width) >= -(-(self.starts + self.lengths) // page)[:, None]] = 0
        self.table = table.astype(np.int32)

    def pages(self, row, dtype=jnp.float32, written=None):
        """All layers' pages [L, P, page, row], with rows up to starts (or `written`)."""
        values = np.full((self.layers, 1 + self.table.size, self.page, row), np.nan, np.float32)
        for b, count in enumerate(self.starts if written is None else written):
            for position in range(count):
                at = self.table[b, position // self.page], position % self.page
                values[:, at[0], at[1]] = self.rng.standard_normal((self.layers, row))
        return jnp.asarray(values, dtype)

    def rows(self, *shape, dtype=jnp.float32):
        """One for each new token [B, T, *shape]."""
        values = self.rng.standard_normal((self.batch, self.tokens, *shape)).astype(np.float32)
        values[np.arange(self.tokens) >= self.lengths[:, None]] = np.nan
        return jnp.asarray(values, dtype)

    def numbers(self, layer=1):
        """layer, page_table, starts, lengths."""
        return jnp.int32(layer), jnp.asarray(self.table), jnp.asarray(self.starts), jnp.asarray(self.lengths)
