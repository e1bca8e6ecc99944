"""The decoder: embedding, layers, norm and head, for any schedule a ModelConfig can spell."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxhybrid.config import (
    AttentionSpec,
    DenseSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelConfig,
)
from jaxhybrid.layers.attention import Attention
from jaxhybrid.layers.feed_forward import Dense, MixtureOfExperts
from jaxhybrid.layers.gated_delta_net import GatedDeltaNet
from jaxhybrid.layers.kimi_delta import KimiDelta
from jaxhybrid.layers.latent_attention import LatentAttention
from jaxhybrid.layers.linear import Linear, project
from jaxhybrid.layers.norm import RmsNorm
from jaxhybrid.layers.parameter import parameter
from jaxhybrid.layers.segments import SegmentPlan, plan_segments
from jaxhybrid.state.arrays import PoolArrays
from jaxhybrid.state.batch import BatchAddress
from jaxhybrid.state.layout import StateLayout, layout_of


@dataclass(frozen=True)
class Execution:
    """How parameters are laid out for the platform that runs them.

    `scan_layers`: repeated patterns are stacked and run by lax.scan, so that compile time does not grow with depth.
    `stack_experts`: experts are one array, for grouped products; off, each is its own buffer and only the chosen are
    read. A CPU wants both off: it copies what it slices out of a stack, and streams separate buffers at full speed.
    """

    scan_layers: bool
    stack_experts: bool

    @classmethod
    def for_platform(cls, platform: str) -> "Execution":
        accelerated = platform != "cpu"
        return cls(scan_layers=accelerated, stack_experts=accelerated)


class DecoderLayer(nnx.Module):
    """h += mixer(norm(h)); h += ffn(norm(h))."""

    def __init__(self, spec: LayerSpec, config: ModelConfig, execution: Execution, dtype: DTypeLike) -> None:
        hidden, eps, centred = config.hidden_size, config.rms_norm_eps, config.zero_centred_norms
        self.paged = spec.mixer.kind in ("attention", "latent_attention")
        self.input_layernorm = RmsNorm(hidden, eps, dtype, centred)
        self.post_attention_layernorm = RmsNorm(hidden, eps, dtype, centred)
        match spec.mixer:
            case AttentionSpec():
                self.mixer: nnx.Module = Attention(spec.mixer, hidden, eps, centred, dtype)
            case LatentAttentionSpec():
                self.mixer = LatentAttention(spec.mixer, hidden, dtype)
            case KimiDeltaSpec():
                self.mixer = KimiDelta(spec.mixer, hidden, eps, dtype)
            case GatedDeltaNetSpec():
                self.mixer = GatedDeltaNet(spec.mixer, hidden, eps, dtype)
        if isinstance(spec.ffn, DenseSpec):
            self.ffn: nnx.Module = Dense(spec.ffn, hidden, dtype)
        else:
            self.ffn = MixtureOfExperts(spec.ffn, hidden, execution.stack_experts, dtype)

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        state: Mapping[str, Array],
        index: int | Array,
        address: BatchAddress,
        max_length: int | None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        extra = (max_length,) if self.paged else ()
        mixed, state = self.mixer(self.input_layernorm(hidden), state, index, address, *extra)
        hidden = hidden + mixed
        valid = address.valid(hidden.shape[1])
        return hidden + self.ffn(self.post_attention_layernorm(hidden), valid), dict(state)


class Segment(nnx.Module):
    """The layers of one pattern; with more than one repeat every parameter carries a leading [repeats] axis."""

    def __init__(self, plan: SegmentPlan, config: ModelConfig, execution: Execution, dtype: DTypeLike) -> None:
        layers = [DecoderLayer(spec, config, execution, dtype) for spec in plan.pattern]
        if plan.repeats > 1:
            layers = [_with_leading_axis(layer, plan.repeats) for layer in layers]
        self.layers = nnx.List(layers)
        self.first = plan.first
        self.repeats = plan.repeats

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        pool: PoolArrays,
        layout: StateLayout,
        address: BatchAddress,
        max_length: int | None,
    ) -> tuple[Float[Array, "B T D"], PoolArrays]:
        if self.repeats == 1:
            return self._once(self.layers, hidden, pool, layout, address, max_length, 0)
        graph, parameters = nnx.split(self.layers)

        def body(
            carry: tuple[Float[Array, "B T D"], PoolArrays], step: tuple[nnx.State, Array]
        ) -> tuple[tuple[Float[Array, "B T D"], PoolArrays], None]:
            layers = nnx.merge(graph, step[0])
            return self._once(layers, carry[0], carry[1], layout, address, max_length, step[1]), None

        (hidden, pool), _ = jax.lax.scan(body, (hidden, pool), (parameters, jnp.arange(self.repeats)))
        return hidden, pool

    def _once(
        self,
        layers: nnx.List,
        hidden: Float[Array, "B T D"],
        pool: PoolArrays,
        layout: StateLayout,
        address: BatchAddress,
        max_length: int | None,
        repeat: int | Array,
    ) -> tuple[Float[Array, "B T D"], PoolArrays]:
        groups = [layout.groups[self.first + place] for place in range(len(layers))]
        for place, layer in enumerate(layers):
            group = groups[place]
            index = layout.ordinals[self.first + place] + repeat * groups.count(group)
            hidden, state = layer(hidden, pool[group], index, address, max_length)
            pool = {**pool, group: state}
        return hidden, pool


def _with_leading_axis(layer: DecoderLayer, repeats: int) -> DecoderLayer:
    graph, parameters = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.zeros((repeats, *leaf.shape), leaf.dtype), parameters))


class MultiTokenPrediction(nnx.Module):
    """Predicts one token further from a trunk output and the next token (DeepSeek-V3, arXiv 2412.19437, 2.2)."""

    def __init__(self, spec: LayerSpec, config: ModelConfig, execution: Execution, dtype: DTypeLike) -> None:
        width = config.hidden_size
        self.enorm = RmsNorm(width, config.rms_norm_eps, dtype)
        self.hnorm = RmsNorm(width, config.rms_norm_eps, dtype)
        self.eh_proj = Linear(2 * width, width, (None, None), dtype)
        self.layer = DecoderLayer(spec, config, execution, dtype)
        self.norm = RmsNorm(width, config.rms_norm_eps, dtype)

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        trunk: Float[Array, "B T D"],
        state: Mapping[str, Array],
        address: BatchAddress,
        max_length: int | None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """`embedded`: of the token after each position. `trunk`: outputs after the trunk's final norm."""
        joined = self.eh_proj(jnp.concatenate([self.enorm(embedded), self.hnorm(trunk)], axis=-1))
        hidden, state = self.layer(joined, state, 0, address, max_length)
        return self.norm(hidden), state


class Decoder(nnx.Module):
    """Parameters of a whole text model. Every method is a pure function of its arguments and the parameters."""

    def __init__(self, config: ModelConfig, execution: Execution, dtype: DTypeLike) -> None:
        self.config = config
        self.embed_tokens = parameter((config.vocab_size, config.hidden_size), ("vocab", None), dtype)
        plans = plan_segments(config.layers, execution.scan_layers)
        self.segments = nnx.List([Segment(plan, config, execution, dtype) for plan in plans])
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype, config.zero_centred_norms)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, ("vocab", None), dtype)
        self.mtp = nnx.List([MultiTokenPrediction(spec, config, execution, dtype) for spec in config.mtp_layers])
        self.layout = layout_of(config.layers)
        self.mtp_layout = layout_of(config.mtp_layers)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.embed_tokens[...][tokens]

    def trunk(
        self, tokens: Int[Array, "B T"], pool: PoolArrays, address: BatchAddress, max_length: int | None = None
    ) -> tuple[Float[Array, "B T D"], PoolArrays]:
        """Outputs after the final norm, and the pool with the rows' state advanced by their lengths.

        A static `max_length` bounds every attention loop at trace time, which makes the call differentiable.
        """
        hidden = self.embed(tokens)
        for segment in self.segments:
            hidden, pool = segment(hidden, pool, self.layout, address, max_length)
        return self.norm(hidden), pool

    def logits(self, outputs: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Float32 scores of the next token."""
        weight = self.embed_tokens[...] if self.config.tie_word_embeddings else self.lm_head.weight[...]
        return project(outputs, weight).astype(jnp.float32)

    def predict_further(
        self,
        following: Int[Array, "B T"],
        outputs: Float[Array, "B T D"],
        pool: PoolArrays,
        address: BatchAddress,
        max_length: int | None = None,
    ) -> tuple[Float[Array, "B T V"], PoolArrays]:
        """The first multi-token-prediction layer: scores of the token after `following`, given the trunk's outputs.

        `following[b, t]` is the token after position t; `pool` holds the layer's own state, by `mtp_layout`.
        """
        group = self.mtp_layout.groups[0]
        hidden, state = self.mtp[0](self.embed(following), outputs, pool[group], address, max_length)
        return self.logits(hidden), {**pool, group: state}


def abstract_decoder(config: ModelConfig, execution: Execution, dtype: DTypeLike) -> Decoder:
    """A decoder whose parameters are shapes only."""
    return nnx.eval_shape(lambda: Decoder(config, execution, dtype))
