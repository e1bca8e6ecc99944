"""Where the arrays of a model lie on a mesh: parameters and state, by the logical names of their axes."""

import jax
from flax import nnx
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, Sharding

from jaxhybrid.layers.parameter import WholeParam
from jaxhybrid.placement import row_major
from jaxhybrid.state.arrays import PoolPlaces
from jaxhybrid.state.layout import LeafSpec, StateLayout
from pallas_kernels.partition import Partition

LANES = 128  # of a TPU's registers


def parameter_struct(variable: nnx.Variable, partition: Partition | None, platform: str) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an abstract parameter. Stacked layers have a leading axis without a name.

    On a TPU parameters are row-major, as products want them [out, in], save those whose last dimension is shorter than
    a register: a compiler left alone lays 2,880 channels along the other side, to pad less, and copies them back.
    """
    where = None
    if partition is not None:
        axes = variable.get_metadata("axes")
        names = (*(None,) * (len(variable.shape) - len(axes)), *axes)
        where = partition.sharding(names, variable.shape)
    ordered = platform == "tpu" and (variable.shape[-1] >= LANES or isinstance(variable, WholeParam))
    place = row_major(len(variable.shape), where) if ordered else where
    return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=place)


def leaf_sharding(leaf: LeafSpec, partition: Partition) -> NamedSharding:
    """Of a state leaf's array: layers, slots or pages, and a page's tokens are never split."""
    above = leaf.leading
    return partition.sharding((*(None,) * above, *leaf.axes), (*(1,) * above, *leaf.shape))


def pool_places(layout: StateLayout, partition: Partition | None, platform: str) -> PoolPlaces | None:
    """Where every array of a pool lies, as programs keep them; None leaves it to the compiler.

    On a TPU all are row-major. A compiler left alone likes to lay slots or pages along a tile, and then copies the
    whole array at the edge of every program whose kernels take rows of it.
    """
    if partition is None and platform != "tpu":
        return None

    def place(leaf: LeafSpec) -> Sharding | Format:
        where = None if partition is None else leaf_sharding(leaf, partition)
        if platform != "tpu":
            assert where is not None
            return where
        return row_major(leaf.leading + len(leaf.shape), where)

    places: PoolPlaces = {}
    for leaf in layout.leaves:
        places.setdefault(leaf.group, {})[leaf.name] = place(leaf)
    return places
