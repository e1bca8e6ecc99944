"""What every layer of a model has in common, and how its parameters are laid out for the platform."""

from dataclasses import dataclass

from jax.typing import DTypeLike

from jaxhybrid.config import ModelConfig


@dataclass(frozen=True)
class Execution:
    """How parameters are laid out for the platform that runs them.

    `scan_layers`: repeated patterns are stacked and run by lax.scan, so that compile time does not grow with depth.
    A TPU multiplies by a layer of a stack where it lies; XLA for CPUs and GPUs copies it out of the stack first.
    `stack_experts`: experts are one array, for grouped products; off, each is its own buffer and only the chosen are
    read, which a CPU streams at full speed.
    """

    scan_layers: bool
    stack_experts: bool

    @classmethod
    def for_platform(cls, platform: str) -> "Execution":
        return cls(scan_layers=platform == "tpu", stack_experts=platform != "cpu")


@dataclass(frozen=True)
class LayerContext:
    """What a layer's modules are built with, beside their own spec. `dtype`: of weights and activations."""

    config: ModelConfig
    execution: Execution
    dtype: DTypeLike

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def eps(self) -> float:
        return self.config.rms_norm_eps

    @property
    def zero_centred(self) -> bool:
        return self.config.zero_centred_norms
