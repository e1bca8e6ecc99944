"""What an engine is given to work with."""

from dataclasses import dataclass

from jaxhybrid.cache.retention import Retention
from jaxhybrid.errors import ConfigError

DEFAULT_RETENTION = Retention(every=1024)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes are fixed when the engine is made: they are the shapes of its compiled programs.

    max_sequences: rows of a decode batch, and live sequences there is always a slot for.
    max_tokens: tokens of token-indexed state (keys, values, latents) that fit, over all sequences and checkpoints.
    max_context: tokens of one sequence; the smaller of `max_tokens` and the model's positions if None.
    max_checkpoints: slots for retained bundles, on top of one for every sequence.
    page_size: tokens to a page.
    prefill_chunks: token counts a prefill program is compiled for, ascending.
    prefill_rows: sequences that one prefill program may take together.
    row_buckets: batch sizes programs are compiled for, ascending, the last at least max_sequences; powers of two if
        None. Fewer buckets compile less and pad more.
    steps_per_dispatch: tokens a decode loop makes on the device before the host looks.
    retention: where checkpoints are kept. By default at every kind of boundary, and every 1,024 tokens besides: what a
        first fork off the middle of a long prompt recomputes is bounded by that.
    max_known_tokens: token ids the prefix index remembers beyond those of its checkpoints.
    poison: fill freed state with NaN, so that a stale read can't go unseen. For tests: every release costs a program.
    """

    max_sequences: int = 8
    max_tokens: int = 65536
    max_context: int | None = None
    max_checkpoints: int = 128
    page_size: int = 64
    prefill_chunks: tuple[int, ...] = (16, 64, 256, 512)
    prefill_rows: int = 1
    row_buckets: tuple[int, ...] | None = None
    steps_per_dispatch: int = 32
    retention: Retention = DEFAULT_RETENTION
    max_known_tokens: int = 16_000_000
    poison: bool = False

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_tokens", "page_size", "prefill_rows", "steps_per_dispatch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_checkpoints < 0:
            raise ConfigError(f"max_checkpoints must be at least 0, got {self.max_checkpoints}")
        if self.max_context is not None and not 1 <= self.max_context <= self.max_tokens:
            raise ConfigError(f"max_context must be 1 to max_tokens={self.max_tokens}, got {self.max_context}")
        for name in ("prefill_chunks", "row_buckets"):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes))):
                raise ConfigError(f"{name} must be ascending positive counts, got {sizes}")
        if self.row_buckets is not None and self.row_buckets[-1] < max(self.max_sequences, self.prefill_rows):
            raise ConfigError(f"row_buckets must reach max_sequences={self.max_sequences}, got {self.row_buckets}")

    def bucket(self, rows: int) -> int:
        """The batch size that `rows` sequences are padded to."""
        if self.row_buckets is None:
            return 1 << (rows - 1).bit_length()
        return next(size for size in self.row_buckets if size >= rows)
