"""What of a model a mesh can split: head counts and widths must divide by its axes, and why where they don't."""

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


def fit_to_mesh(config: ModelConfig, partition: Partition | None) -> ModelConfig:
    """The configuration as it runs on the mesh: of fewer key/value heads than shards, each is kept several times.

    Raises ConfigError naming the first count that doesn't divide by its mesh axis. (A vocabulary that doesn't divide
    is held whole by every device.)
    """
    if partition is None:
        return config
    return replace(
        config,
        layers=tuple(_fit_layer(layer, partition, number) for number, layer in enumerate(config.layers)),
        mtp_layers=tuple(_fit_layer(layer, partition, number) for number, layer in enumerate(config.mtp_layers)),
    )


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


def _fit_layer(layer: LayerSpec, partition: Partition, number: int) -> LayerSpec:
    mixer = _with_copies(layer.mixer, partition.size("kv_heads"))
    for part in (mixer, layer.ffn):
        for what, (axis, count) in (_counts(part) if part is not None else {}).items():
            if count % partition.size(axis):
                raise ConfigError(
                    f"layer {number}: {count} {what} of its {part.kind if part else ''} can't be shared out to "
                    f"{partition.size(axis)} devices along the mesh's axis {dict(partition.axes)[axis]!r}"
                )
    return replace(layer, mixer=mixer)


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
                "channels of the experts' inner width": ("mlp", part.moe_intermediate_size),
                "channels of the shared expert's inner width": ("mlp", part.shared_intermediate_size),
            }
