"""Where the arrays of a model lie on a mesh: parameters and state, by the logical names of their axes."""

import jax
from flax import nnx
from jax.sharding import NamedSharding

from jaxhybrid.state.arrays import PoolShardings
from jaxhybrid.state.layout import LeafSpec, StateLayout
from pallas_kernels.partition import Partition


def parameter_struct(variable: nnx.Variable, partition: Partition | None) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an abstract parameter. Stacked layers have a leading axis without a name."""
    if partition is None:
        return jax.ShapeDtypeStruct(variable.shape, variable.dtype)
    axes = variable.get_metadata("axes")
    names = (*(None,) * (len(variable.shape) - len(axes)), *axes)
    return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=partition.sharding(names, variable.shape))


def leaf_sharding(leaf: LeafSpec, partition: Partition) -> NamedSharding:
    """Of a state leaf's array: layers, slots or pages, and a page's tokens are never split."""
    above = 2 if leaf.growth == "fixed" else 3
    return partition.sharding((*(None,) * above, *leaf.axes), (*(1,) * above, *leaf.shape))


def pool_shardings(layout: StateLayout, partition: Partition | None) -> PoolShardings | None:
    """A sharding for every array of a pool, as programs keep them; None on one device."""
    if partition is None:
        return None
    shardings: PoolShardings = {}
    for leaf in layout.leaves:
        shardings.setdefault(leaf.group, {})[leaf.name] = leaf_sharding(leaf, partition)
    return shardings
