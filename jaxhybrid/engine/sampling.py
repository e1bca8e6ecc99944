"""How the next token is chosen: what a caller asks for, and the choice itself, on the device."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxhybrid.errors import ConfigError
from jaxhybrid.generation import GenerationDefaults


@dataclass(frozen=True)
class Sampling:
    """How one sequence is continued.

    max_tokens: stop after that many. temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: as in nucleus sampling
    (arXiv 1904.09751) and min-p (arXiv 2407.01082). repetition_penalty divides positive and multiplies negative scores
    of every token seen (arXiv 1909.05858); presence_penalty and frequency_penalty are subtracted once, or once per
    occurrence, for tokens generated. stop_token_ids end the sequence before themselves; stop are strings that end it
    where they begin. seed: the draw of position n depends on seed and n alone.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "max_tokens": self.max_tokens >= 1,
            "temperature": 0 <= self.temperature < math.inf,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": 0 < self.repetition_penalty < math.inf,
            "presence_penalty": math.isfinite(self.presence_penalty),
            "frequency_penalty": math.isfinite(self.frequency_penalty),
            "seed": 0 <= self.seed < 2**32,
            "stop": not isinstance(self.stop, str) and all(self.stop),
        }
        wrong = [f"{name}={getattr(self, name)!r}" for name, fine in checks.items() if not fine]
        if wrong:
            raise ConfigError(f"sampling options out of range: {', '.join(wrong)}")

    @classmethod
    def from_defaults(cls, defaults: GenerationDefaults, **options: Any) -> Self:
        """As the checkpoint recommends (`model.generation_defaults`), apart from `options`."""
        return cls(**(asdict(defaults) | options))


@dataclass(frozen=True)
class SamplingMode:
    """Which parts of the choice a compiled decode loop contains."""

    random: bool
    filtered: bool
    penalised: bool

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> "SamplingMode":
        random = any(row.temperature > 0 for row in rows)
        return cls(
            random=random,
            filtered=random and any(row.top_k or row.top_p < 1 or row.min_p > 0 for row in rows),
            penalised=any(row.repetition_penalty != 1 or row.presence_penalty or row.frequency_penalty for row in rows),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingControls:
    """Options of B rows as arrays. `stop_token_ids` is padded with -1."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    stop_token_ids: Int[Array, "B S"]
    seed: UInt32[Array, " B"]

    @classmethod
    def of(cls, rows: Sequence[Sampling], size: int, stop_width: int) -> "SamplingControls":
        """Padded to `size` rows (greedy, never stopping)."""
        padded = [*rows, *[Sampling()] * (size - len(rows))]

        def column(name: str, dtype: type) -> Array:
            return jnp.asarray(np.array([getattr(row, name) for row in padded], dtype))

        stops = np.full((size, stop_width), -1, np.int32)
        for number, row in enumerate(rows):
            stops[number, : len(row.stop_token_ids)] = row.stop_token_ids
        floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        return cls(
            **{name: column(name, np.float32) for name in floats},
            top_k=column("top_k", np.int32),
            stop_token_ids=jnp.asarray(stops),
            seed=column("seed", np.uint32),
        )


def choose_tokens(
    logits: Float[Array, "B V"],
    controls: SamplingControls,
    mode: SamplingMode,
    positions: Int[Array, " B"],
    seen: Int[Array, "B V"] | None,
    made: Int[Array, "B V"] | None,
) -> Int[Array, " B"]:
    """The next token of each row.

    `seen` counts each token in prompt and output, `made` in the output alone; both are given where mode.penalised.
    """
    if seen is not None and made is not None:
        logits = _penalise(logits, controls, seen, made)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not mode.random:
        return greedy
    scaled = logits / jnp.maximum(controls.temperature, 1e-6)[:, None]
    if mode.filtered:
        scaled = _filter(scaled, controls)
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(controls.seed, positions)
    drawn = jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
    return jnp.where(controls.temperature > 0, drawn, greedy)


def _penalise(
    logits: Float[Array, "B V"], controls: SamplingControls, seen: Int[Array, "B V"], made: Int[Array, "B V"]
) -> Float[Array, "B V"]:
    repetition = controls.repetition_penalty[:, None]
    damped = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, damped, logits)
    return logits - controls.presence_penalty[:, None] * (made > 0) - controls.frequency_penalty[:, None] * made


def _filter(scaled: Float[Array, "B V"], controls: SamplingControls) -> Float[Array, "B V"]:
    """Minus infinity outside the top k, then outside the nucleus of what is left, then below min_p of the best."""
    order = jnp.argsort(-scaled, axis=-1)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(scaled.shape[-1])
    top_k = jnp.where(controls.top_k > 0, controls.top_k, scaled.shape[-1])[:, None]
    ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    best = probabilities[:, :1]
    kept = (before < controls.top_p[:, None]) & (probabilities >= controls.min_p[:, None] * best)
    ranked = jnp.where(kept, ranked, -jnp.inf)
    return jnp.put_along_axis(jnp.zeros_like(scaled), order, ranked, axis=-1, inplace=False)
