"""Experts on a mesh: each device runs its own experts, and its part of their inner width, for its rows of tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.experts import ExpertBiases
from pallas_kernels.partition import Partition, current, partitioned


def split_experts(run: Callable[..., Float[Array, "N D"]], *arguments: Any, **options: Any) -> Float[Array, "N D"]:
    """`run` on every device of the partition, with arguments and options of `routed_experts`; one sum joins the parts.

    `rows` splits the tokens (where they divide), `experts` stacked matrices, `expert_mlp` the inner width. To a device,
    an assignment to another's expert has an id out of range.
    """
    partition = current()
    if partition is None:
        return run(*arguments, **options)
    x, up, biases, layer = arguments[0], arguments[4], options["biases"], options["layer"]
    stacked = not isinstance(up, tuple)
    sizes = {"rows": x.shape[0], "expert_mlp": up[0].shape[-2], "experts": up.shape[-3] if stacked else 1}
    partition = partition.without({name for name, size in sizes.items() if size % partition.size(name)})
    summed = partition.of("experts") + partition.of("expert_mlp")

    def local(arguments: tuple[Any, ...], biases: ExpertBiases | None, layer: Any) -> Float[Array, "n D"]:
        x, expert_ids, weights, gate, up, down, valid = arguments
        expert_ids = expert_ids - _place(partition, "experts") * (up.shape[-3] if stacked else len(up))
        if biases is not None:  # all parts of the inner width are summed: one of them brings the last bias
            biases = biases._replace(down=biases.down * (_place(partition, "expert_mlp") == 0))
        with partitioned(None):
            out = run(x, expert_ids, weights, gate, up, down, valid, **{**options, "biases": biases, "layer": layer})
        return jax.lax.psum(out, summed) if summed else out

    return jax.shard_map(
        local,
        mesh=partition.mesh,
        in_specs=(
            _argument_specs(partition, stacked, layer is not None),
            _bias_specs(partition, stacked) if biases is not None else None,
            partition.spec(()) if layer is not None else None,
        ),
        out_specs=partition.spec(("rows",)),
        check_vma=False,
    )(arguments, biases, None if layer is None else jnp.asarray(layer))


def _place(partition: Partition, name: str) -> Any:
    axes = partition.of(name)
    return jax.lax.axis_index(axes) if axes else 0


def _argument_specs(partition: Partition, stacked: bool, layers: bool) -> tuple[Any, ...]:
    experts = (*(None,) * layers, *("experts",) * stacked)
    rows = partition.spec(("rows",))
    up, down = partition.spec((*experts, "expert_mlp", None)), partition.spec((*experts, None, "expert_mlp"))
    return rows, rows, rows, up, up, down, rows


def _bias_specs(partition: Partition, stacked: bool) -> Any:
    experts = "experts" if stacked else None
    inner, outer = partition.spec((experts, "expert_mlp")), partition.spec((experts, None))
    specs: Any = inner, inner, outer
    return ExpertBiases(*specs)
