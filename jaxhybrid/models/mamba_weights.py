"""What families with Mamba-2 layers share: the published tensor names and the limits of the step size."""

import math

from jaxhybrid.config import Mamba2Spec
from jaxhybrid.models.config_reader import ConfigReader
from jaxhybrid.models.weight_table import LayerPlace


def step_limit(read: ConfigReader) -> tuple[float, float]:
    """`time_step_limit`: least and greatest step size. JSON has no infinity; files write it in two ways."""
    low, high = read.take("time_step_limit", default=None) or (0.0, math.inf)
    return float(low), math.inf if high in ({"__float__": "Infinity"}, "Infinity") else float(high)


def mamba2_weights(place: LayerPlace, prefix: str, spec: Mamba2Spec) -> None:
    """The tensors of a Mamba-2 mixer."""
    for name in ("in_proj", "out_proj"):
        for leaf in ("weight", "bias") if spec.proj_bias else ("weight",):
            place.add(f"{prefix}.{name}.{leaf}", "mixer", name, leaf)
    place.add(f"{prefix}.conv1d.weight", "mixer", "conv", shape=(spec.conv_dim, 1, spec.conv_kernel_size))
    if spec.conv_bias:
        place.add(f"{prefix}.conv1d.bias", "mixer", "conv_bias")
    for name in ("A_log", "D", "dt_bias"):
        place.add(f"{prefix}.{name}", "mixer", name)
    if spec.norm:
        place.add(f"{prefix}.norm.weight", "mixer", "norm")
