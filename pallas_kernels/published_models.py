"""Published models with the gated delta rule, as far as its kernels see them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaModel:
    """Key heads, value heads, head width, and whether decay is per key channel (KDA) or per head (Gated DeltaNet)."""

    key_heads: int
    value_heads: int
    per_channel: bool
    dim: int = 128


DELTA_MODELS = {
    "Kimi Linear 48B": DeltaModel(32, 32, True),
    "Kimi Linear 48B, a chip of 8": DeltaModel(4, 4, True),
    "Qwen3-Next 80B": DeltaModel(16, 32, False),
    "Qwen3.5, 16 value heads": DeltaModel(16, 16, False),
    "Qwen3.5, 64 value heads": DeltaModel(16, 64, False),
}
