"""What families with Mamba-2 layers share: config keys and the published tensor names."""

import math

from jaxhybrid.config import Mamba2Spec
from jaxhybrid.config_reader import ConfigReader
from jaxhybrid.key_kinds import INFINITIES
from jaxhybrid.models.weight_table import LayerPlace, rows


def step_limit(read: ConfigReader) -> tuple[float, float]:
    """`time_step_limit`: least and greatest step size."""
    low, high = read.take("time_step_limit", default=None) or (0.0, math.inf)
    return float(low), math.inf if high in INFINITIES else float(high)


def mamba2_spec(read: ConfigReader, width: int, norm: bool = True) -> Mamba2Spec:
    """From the `mamba_*` keys of Bamba, Granite and Falcon-H1. `width`: of all heads together.

    Raises ConfigError for a missing key, or heads that do not add up to `width`.
    """
    heads, head_dim = read.take("mamba_n_heads"), read.take("mamba_d_head", default="auto")
    head_dim = width // heads if head_dim == "auto" else head_dim
    if heads * head_dim != width:
        raise read.error(f"mamba_n_heads={heads} of mamba_d_head={head_dim} do not make up {width} channels")
    read.take("mamba_chunk_size", default=None)
    return Mamba2Spec(
        num_heads=heads,
        head_dim=head_dim,
        n_groups=read.take("mamba_n_groups", default=1),
        state_size=read.take("mamba_d_state"),
        conv_kernel_size=read.take("mamba_d_conv"),
        conv_bias=read.take("mamba_conv_bias", default=True),
        proj_bias=read.take("mamba_proj_bias", default=False),
        norm=norm,
        time_step_limit=step_limit(read),
    )


def mamba2_weights(place: LayerPlace, prefix: str, spec: Mamba2Spec, *path: str) -> None:
    """The tensors of a Mamba-2 mixer at `path`: in_proj holds the rows of z, x, B, C, dt, and conv1d of x, B, C."""
    inner, convolved = spec.intermediate_size, slice(0, spec.intermediate_size)
    total = inner + spec.conv_dim + spec.num_heads
    for part, chosen in (
        ("z", slice(0, inner)),
        ("x", slice(inner, 2 * inner)),
        ("bc", slice(2 * inner, inner + spec.conv_dim)),
        ("dt", slice(inner + spec.conv_dim, total)),
    ):
        for leaf, shape in (("weight", (total, place.hidden)), ("bias", (total,)))[: 1 + spec.proj_bias]:
            place.add(f"{prefix}.in_proj.{leaf}", *path, f"in_proj_{part}", leaf, shape=shape, convert=rows(chosen))
    for part, chosen in (("x", convolved), ("bc", slice(inner, spec.conv_dim))):
        conv_shape = (spec.conv_dim, 1, spec.conv_kernel_size)
        place.add(f"{prefix}.conv1d.weight", *path, f"conv_{part}", shape=conv_shape, convert=rows(chosen))
        if spec.conv_bias:
            bias_shape = (spec.conv_dim,)
            place.add(f"{prefix}.conv1d.bias", *path, f"conv_{part}_bias", shape=bias_shape, convert=rows(chosen))
    for leaf in ("weight", "bias") if spec.proj_bias else ("weight",):
        place.add(f"{prefix}.out_proj.{leaf}", *path, "out_proj", leaf)
    for name in ("A_log", "D", "dt_bias"):
        place.add(f"{prefix}.{name}", *path, name)
    if spec.norm:
        place.add(f"{prefix}.norm.weight", *path, "norm")
