"""What of a model a mesh can split: head counts and widths must divide by its axes, and why where they don't."""

from collections.abc import Iterator
from dataclasses import replace

import jax

from jaxhybrid.config import (
    AttentionMamba2Spec,
    AttentionSpec,
    CompressedAttentionSpec,
    DenseSpec,
    FfnSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    ModelConfig,
    MoeSpec,
)
from jaxhybrid.errors import ConfigError
from jaxhybrid.layers.context import Execution
from pallas_kernels.partition import Partition

Counts = dict[str, tuple[str, int]]  # what is counted -> its logical axis, and how many


# Logical axes that are split over fewer mesh axes together, if one of them doesn't divide.
_TOGETHER: tuple[set[str], ...] = ({"heads", "kv_heads"}, {"mlp"}, {"vocab"})


def fit_to_mesh(config: ModelConfig, partition: Partition | None) -> tuple[ModelConfig, Partition | None]:
    """The configuration as it runs on the mesh, and what the mesh splits of it.

    Of fewer key/value heads than shards, each is kept several times. Heads, inner widths or a vocabulary that don't
    divide by the mesh's axes `expert` and `model` together are split over `model` alone. Raises ConfigError naming the
    first count that doesn't divide by its mesh axes then. (A vocabulary that doesn't is held whole by every device.)
    """
    if partition is None:
        return config, None
    for names in _TOGETHER:
        if any(name in names and count % partition.size(name) for _, _, _, name, count in _counted(config, partition)):
            partition = partition.without(names, "expert")
    for number, part, what, name, count in _counted(config, partition):
        if name != "vocab" and count % partition.size(name):
            axes = partition.of(name)
            raise ConfigError(
                f"layer {number}: {count} {what} of its {part} can't be shared out to {partition.size(name)} devices "
                f"along the mesh's {'axis' if len(axes) == 1 else 'axes'} {' and '.join(map(repr, axes))}"
            )
    return replace(
        config,
        layers=tuple(_with_heads_for(layer, partition) for layer in config.layers),
        mtp_layers=tuple(_with_heads_for(layer, partition) for layer in config.mtp_layers),
    ), partition


def execution_on(partition: Partition | None, wanted: Execution | None) -> Execution:
    """How parameters are laid out: as wanted, or as the platform wants them, with experts stacked to be split.

    Raises ConfigError if separate experts are wanted on a mesh that splits them.
    """
    execution = wanted or Execution.for_platform(jax.default_backend())
    if partition is None or partition.size("experts") == 1 or execution.stack_experts:
        return execution
    if wanted is not None:
        raise ConfigError("a mesh that splits experts needs stack_experts=True, got separate experts")
    return replace(execution, stack_experts=True)


def _counted(config: ModelConfig, partition: Partition) -> Iterator[tuple[int, str, str, str, int]]:
    """Layer, part, what is counted in it, its logical axis and how many: everything that must divide."""
    yield 0, "embedding", "tokens", "vocab", config.vocab_size
    for layers in (config.layers, config.mtp_layers):
        for number, layer in enumerate(layers):
            for part in (_with_heads_for(layer, partition).mixer, layer.ffn):
                for what, (axis, count) in (_counts(part) if part is not None else {}).items():
                    yield number, part.kind if part else "", what, axis, count


def _with_heads_for(layer: LayerSpec, partition: Partition) -> LayerSpec:
    return replace(layer, mixer=_with_copies(layer.mixer, partition.size("kv_heads")))


def _with_copies(mixer: MixerSpec | None, shards: int) -> MixerSpec | None:
    """Where shards are a multiple of the key/value heads, each shard keeps one of its own."""
    if isinstance(mixer, AttentionMamba2Spec):
        attention = _with_copies(mixer.attention, shards)
        assert isinstance(attention, AttentionSpec)
        return replace(mixer, attention=attention)
    if isinstance(mixer, AttentionSpec) and shards % mixer.num_key_value_heads == 0:
        return replace(mixer, kv_copies=shards // mixer.num_key_value_heads)
    return mixer


def _counts(part: MixerSpec | FfnSpec) -> Counts:
    """Everything that must divide for a part of a layer to be split."""
    match part:
        case AttentionSpec():
            heads = part.num_key_value_heads * part.kv_copies
            return {"attention heads": ("heads", part.num_attention_heads), "key/value heads": ("kv_heads", heads)}
        case LatentAttentionSpec():
            return {"attention heads": ("heads", part.num_attention_heads)}
        case CompressedAttentionSpec():
            heads = part.num_attention_heads
            return {"attention heads": ("heads", heads), "groups of heads": ("heads", part.o_groups)}
        case KimiDeltaSpec():
            return {"heads": ("heads", part.num_heads)}
        case GatedDeltaNetSpec():
            return {"key heads": ("heads", part.num_key_heads), "value heads": ("heads", part.num_value_heads)}
        case Mamba2Spec():
            return {"heads": ("heads", part.num_heads)}
        case AttentionMamba2Spec():
            return _counts(part.attention) | {f"Mamba {what}": count for what, count in _counts(part.mamba).items()}
        case Mamba1Spec():
            return {"channels": ("heads", part.intermediate_size)}
        case DenseSpec():
            return {"channels of the inner width": ("mlp", part.intermediate_size)}
        case MoeSpec():
            return {
                "experts": ("experts", part.num_experts),
                "channels of the experts' inner width": ("expert_mlp", part.moe_intermediate_size),
                "channels of the shared expert's inner width": ("mlp", part.shared_intermediate_size),
            }
