"""The decoder: embedding, layers, norm and head, for any schedule a ModelConfig can spell."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxhybrid.config import HyperConnections, LayerSpec, ModelConfig
from jaxhybrid.layers.context import Execution, LayerContext
from jaxhybrid.layers.indexer import no_choice
from jaxhybrid.layers.linear import Linear, project, scaled
from jaxhybrid.layers.mixers import build
from jaxhybrid.layers.norm import RmsNorm
from jaxhybrid.layers.parameter import WholeParam, parameter, with_leading_axis
from jaxhybrid.layers.residual import ends, residual
from jaxhybrid.layers.segments import SegmentPlan, plan_segments
from jaxhybrid.layers.step import MediaInputs, Step
from jaxhybrid.layers.vision import VisionTower
from jaxhybrid.state.arrays import PoolArrays
from jaxhybrid.state.batch import BatchAddress
from jaxhybrid.state.layout import StateLayout, layout_of
from pallas_kernels.partition import Partition, constrain, partitioned

Stream = Any  # what flows between layers; see layers/residual.py
HANDED_ON = "handed_on"  # beside the pool's groups, within one call: what mixers leave for those after them


class DecoderLayer(nnx.Module):
    """h += mixer(norm(h)); h += ffn(norm(h)); either may be absent, and what is added may pass a norm first."""

    def __init__(self, spec: LayerSpec, context: LayerContext) -> None:
        self.spec = spec
        if spec.mixer is not None:
            self.mixer = build(spec.mixer, context)
            self.mixer_norm = _norm(context)
            self.mixer_residual = residual(spec, context, first=True)
            if spec.post_norms:
                self.mixer_post_norm = _norm(context)
        if spec.ffn is not None:
            self.ffn = build(spec.ffn, context)
            self.ffn_norm = _norm(context)
            self.ffn_residual = residual(spec, context, first=spec.mixer is None)
            if spec.post_norms:
                self.ffn_post_norm = _norm(context)

    def __call__(
        self, stream: Stream, state: dict[str, Array], index: int | Array, step: Step
    ) -> tuple[Stream, dict[str, Array]]:
        """`state`: of the mixer's group, or empty without a mixer."""
        if self.spec.mixer is not None:
            x, held = self.mixer_residual.enter(stream)
            mixed, state = self.mixer(self.mixer_norm(x), state, index, step)
            stream = self.mixer_residual.leave(held, self.mixer_post_norm(mixed) if self.spec.post_norms else mixed)
        if self.spec.ffn is not None:
            x, held = self.ffn_residual.enter(stream)
            out = self.ffn(self.ffn_norm(x), step)
            stream = self.ffn_residual.leave(held, self.ffn_post_norm(out) if self.spec.post_norms else out)
        return stream, state


def _norm(context: LayerContext) -> RmsNorm:
    return RmsNorm(context.hidden_size, context.eps, context.dtype, context.zero_centred)


class Segment(nnx.Module):
    """The layers of one pattern; with more than one repeat every parameter carries a leading [repeats] axis."""

    def __init__(self, plan: SegmentPlan, context: LayerContext) -> None:
        layers = [DecoderLayer(spec, context) for spec in plan.pattern]
        if plan.repeats > 1:
            layers = [with_leading_axis(layer, plan.repeats) for layer in layers]
        self.layers = nnx.List(layers)
        self.first = plan.first
        self.repeats = plan.repeats

    def __call__(self, stream: Stream, pool: PoolArrays, layout: StateLayout, step: Step) -> tuple[Stream, PoolArrays]:
        if self.repeats == 1:
            return self._once(self.layers, stream, pool, layout, step, 0)
        graph, *states = nnx.split(self.layers, WholeParam, ...)
        whole, sliced = states

        def body(
            carry: tuple[Stream, PoolArrays], repeat: tuple[nnx.State, Array]
        ) -> tuple[tuple[Stream, PoolArrays], None]:
            layers = nnx.merge(graph, whole, repeat[0])
            return self._once(layers, *carry, layout, replace(step, repeat=repeat[1]), repeat[1]), None

        (stream, pool), _ = jax.lax.scan(body, (stream, pool), (sliced, jnp.arange(self.repeats)))
        return stream, pool

    def _once(
        self, layers: nnx.List, stream: Stream, pool: PoolArrays, layout: StateLayout, step: Step, repeat: int | Array
    ) -> tuple[Stream, PoolArrays]:
        groups = [layout.groups[self.first + place] for place in range(len(layers))]
        for place, layer in enumerate(layers):
            group = groups[place]
            if group is None:
                stream, _ = layer(stream, {}, 0, step)
                continue
            index = layout.ordinals[self.first + place] + repeat * groups.count(group)
            handed = pool.get(HANDED_ON, {})
            stream, state = layer(stream, {**pool[group], **handed}, index, step)
            if handed:
                pool = {**pool, HANDED_ON: {name: state.pop(name, value) for name, value in handed.items()}}
            pool = {**pool, group: state}
        return stream, pool


class MultiTokenPrediction(nnx.Module):
    """Predicts one token further from a trunk output and the next token (DeepSeek-V3, arXiv 2412.19437, 2.2)."""

    def __init__(self, spec: LayerSpec, context: LayerContext) -> None:
        width = context.hidden_size
        self.enorm, self.hnorm, self.norm = _norm(context), _norm(context), _norm(context)
        self.eh_proj = Linear(2 * width, width, (None, None), context.dtype)
        self.layer = DecoderLayer(spec, context)

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        trunk: Float[Array, "B T D"],
        state: Mapping[str, Array],
        step: Step,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """`embedded`: of the token after each position. `trunk`: outputs after the trunk's final norm."""
        joined = self.eh_proj(jnp.concatenate([self.enorm(embedded), self.hnorm(trunk)], axis=-1))
        hidden, state = self.layer(joined, dict(state), 0, step)
        return self.norm(hidden), state


class StreamPrediction(nnx.Module):
    """As MultiTokenPrediction, from all of the trunk's residual streams (DeepSeek-V4, arXiv 2606.19348)."""

    def __init__(self, spec: LayerSpec, context: LayerContext) -> None:
        width = context.hidden_size
        self.enorm, self.hnorm, self.norm = _norm(context), _norm(context), _norm(context)
        self.e_proj = Linear(width, width, (None, None), context.dtype)
        self.h_proj = Linear(width, width, (None, None), context.dtype)
        self.layer = DecoderLayer(spec, context)
        self.ends = ends(context)

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        streams: Float[Array, "B T n D"],
        state: Mapping[str, Array],
        step: Step,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """`embedded`: of the token after each position. `streams`: after the trunk's last layer."""
        joined = self.h_proj(self.hnorm(streams)) + self.e_proj(self.enorm(embedded))[:, :, None]
        streams, state = self.layer(joined, dict(state), 0, step)
        return self.norm(self.ends.end(streams)), state


class Decoder(nnx.Module):
    """Parameters of a whole text model. Every method is a pure function of its arguments and the parameters.

    With a `partition` they run on its mesh.
    """

    def __init__(
        self, config: ModelConfig, execution: Execution, dtype: DTypeLike, partition: Partition | None = None
    ) -> None:
        context = LayerContext(config, execution, dtype)
        self.config = config
        self.partition = partition
        self.embed_tokens = parameter((config.vocab_size, config.hidden_size), ("vocab", None), dtype)
        plans = plan_segments(config.layers, execution.scan_layers)
        self.segments = nnx.List([Segment(plan, context) for plan in plans])
        self.ends = ends(context)
        self.norm = _norm(context)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, ("vocab", None), dtype)
        if config.vision is not None:
            self.visual = VisionTower(config.vision, dtype)
        self.many_streams = isinstance(config.residual, HyperConnections)
        prediction = StreamPrediction if self.many_streams else MultiTokenPrediction
        self.mtp = nnx.List([prediction(spec, context) for spec in config.mtp_layers])
        self.layout = layout_of(config.layers)
        self.mtp_layout = layout_of(config.mtp_layers)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        embedded = self.embed_tokens[...][tokens]
        if self.config.embedding_scale == 1.0:
            return embedded
        return embedded * jnp.asarray(self.config.embedding_scale, embedded.dtype)

    def trunk(
        self, tokens: Int[Array, "B T"], pool: PoolArrays, address: BatchAddress, media: MediaInputs | None = None
    ) -> tuple[Float[Array, "B T D"], PoolArrays]:
        """Outputs after the final norm, and the pool with the rows' state advanced by their lengths."""
        stream, pool = self.stream(tokens, pool, address, media)
        return self.outputs(stream), pool

    def stream(
        self, tokens: Int[Array, "B T"], pool: PoolArrays, address: BatchAddress, media: MediaInputs | None = None
    ) -> tuple[Stream, PoolArrays]:
        """What flows out of the last layer, and the pool as `trunk` returns it."""
        step = Step(tokens, address, media)
        embedded = self.embed(tokens)
        if media is not None:
            embedded = jnp.where(media.present[..., None], media.embeddings, embedded)
        with partitioned(self.partition):
            stream = self.ends.start(constrain(embedded, "rows"))
            if handed := no_choice(self.config.layers, self.layout, pool, step):
                pool = {**pool, HANDED_ON: handed}
            for segment in self.segments:
                stream, pool = segment(stream, pool, self.layout, step)
            return stream, {group: leaves for group, leaves in pool.items() if group != HANDED_ON}

    def outputs(self, stream: Stream) -> Float[Array, "B T D"]:
        """What `logits` takes."""
        with partitioned(self.partition):
            return self.norm(self.ends.end(stream))

    def logits(self, outputs: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Float32 scores of the next token."""
        weight = self.embed_tokens[...] if self.config.tie_word_embeddings else self.lm_head.weight[...]
        return scaled(project(outputs, weight).astype(jnp.float32), self.config.logit_scale)

    def predict_further(
        self,
        following: Int[Array, "B T"],
        stream: Stream,
        pool: PoolArrays,
        address: BatchAddress,
    ) -> tuple[Float[Array, "B T V"], PoolArrays]:
        """The first multi-token-prediction layer: scores of the token after `following`, given the trunk's `stream`.

        `following[b, t]` is the token after position t; `pool` holds the layer's own state, by `mtp_layout`.
        """
        group = self.mtp_layout.groups[0]
        assert group is not None
        with partitioned(self.partition):
            embedded = constrain(self.embed(following), "rows")
            trunk = stream if self.many_streams else self.outputs(stream)
            hidden, state = self.mtp[0](embedded, trunk, pool[group], Step(following, address))
        return self.logits(hidden), {**pool, group: state}


def abstract_decoder(
    config: ModelConfig, execution: Execution, dtype: DTypeLike, partition: Partition | None = None
) -> Decoder:
    """A decoder whose parameters are shapes only."""
    return nnx.eval_shape(lambda: Decoder(config, execution, dtype, partition))
