"""One token of the gated delta rule on TPU: states move from pool to VMEM and back once, and nothing else moves.

A grid step takes a block of a row's value heads, or several rows where a row's states are small. Their states are
copied from read slots and to write slots of the same array (`pallas_kernels/slot_steps_tpu.py`), so the pool is neither
gathered from nor scattered to. No row may write a slot that another row reads.

Both products with a state are of the decayed one, before the update: S'^T q + (k . q) u is what q reads after it. So
they need not wait for each other. All arithmetic is float32 on the vector unit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import slot_steps_tpu
from pallas_kernels.slot_steps_tpu import Steps
from pallas_kernels.tpu_vectors import Spread, normalised

# States of one grid step of the kernels that let the pipeline move them.
BLOCK_BYTES = 1 << 20


def accepts_widths(key_dim: int, value_dim: int) -> str | None:
    """Why the kernels on TPU cannot run heads of these widths, or None."""
    for name, width in (("key_head_dim", key_dim), ("value_head_dim", value_dim)):
        if width % 128:
            return f"{name} {width} is not a multiple of 128"
    return None


def heads_per_block(value_heads: int, groups: int, state_bytes: int) -> int:
    """Value heads of a grid step: as many whole groups as fit into `BLOCK_BYTES`, at least one; divides the heads."""
    return max((n for n in _sizes(value_heads, groups) if n * state_bytes <= BLOCK_BYTES), default=groups)


def steps_of(batch: int, value_heads: int, groups: int, state_bytes: int, cores: int = 1) -> Steps:
    """Of `decode`, for states of so many bytes a head."""
    return slot_steps_tpu.plan(batch, value_heads, _sizes(value_heads, groups), state_bytes, cores)


def _sizes(value_heads: int, groups: int) -> list[int]:
    """Whole groups of heads that divide all of them."""
    return [n for n in range(groups, value_heads + 1, groups) if value_heads % n == 0]


def decode(
    q: Float[Array, "B Hk dk"],
    k: Float[Array, "B Hk dk"],
    v: Float[Array, "B Hv dv"],
    log_decay: Float[Array, "B Hv"] | Float[Array, "B Hv dk"],
    beta: Float[Array, "B Hv"],
    state: Float[Array, "L N Hv dk dv"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "L N Hv dk dv"]]:
    """One step; arguments as in `pallas_kernels.gated_delta.gated_delta`, without the axis of tokens."""
    batch, value_heads, value_dim = v.shape
    key_heads, key_dim = q.shape[1:]
    groups, state_bytes = value_heads // key_heads, key_dim * value_dim * state.dtype.itemsize
    steps = steps_of(batch, value_heads, groups, state_bytes, slot_steps_tpu.cores_of(interpret))
    heads = steps.rows * steps.size
    keys, per_channel = heads // groups, log_decay.ndim == 3

    def vectors(x):
        """Of steps. Tokens of padding decay by 1 and add 0; the compiler fuses this into what lays them out."""
        return steps.split(jnp.where(lengths.reshape(-1, *[1] * (x.ndim - 1)) > 0, x, 0))

    def scalars(x):
        return vectors(x.astype(jnp.float32)).reshape(steps.total, 1, heads)

    of_heads, anywhere = steps.now(1, heads, memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    states = batch * value_heads
    out, state = pl.pallas_call(
        functools.partial(_kernel, steps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=steps.grid,
            in_specs=[
                steps.ahead(keys, key_dim),
                steps.ahead(keys, key_dim),
                steps.now(heads, value_dim),
                steps.ahead(heads, key_dim) if per_channel else of_heads,
                of_heads,
                anywhere,
            ],
            out_specs=[steps.now(heads, value_dim), anywhere],
            scratch_shapes=[
                pltpu.VMEM((2, key_dim, _spread(keys, heads, per_channel, value_dim).depth), jnp.bfloat16),
                pltpu.VMEM((2, key_dim, keys), jnp.float32),
                pltpu.VMEM((2, keys, value_dim), jnp.float32),
                *steps.scratch(key_dim, value_dim, dtype=state.dtype),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((steps.total, heads, value_dim), jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={8: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=states * 7 * key_dim * value_dim,
            transcendentals=states * (key_dim if per_channel else 1),
            bytes_accessed=2 * states * state_bytes
            + sum(x.size * x.dtype.itemsize for x in (q, k, v, log_decay, beta))
            + v.size * 4,
        ),
        interpret=interpret,
        name="gated_delta_decode",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *map(steps.slots, (read_slots, write_slots)),
        *map(vectors, (q, k, v)),
        vectors(log_decay) if per_channel else scalars(log_decay),
        scalars(beta),
        state,
    )
    return steps.join(out), state


def _spread(keys: int, heads: int, per_channel: bool, value_dim: int) -> Spread:
    """Of a step's keys and, per channel, decays."""
    return Spread((keys, heads) if per_channel else (keys,), value_dim)


def _kernel(
    steps, layer, read_slots, write_slots, q, k, v, log_decay, beta, states, out, new_states, columns, queries,
    overlaps, *scratch,
):  # fmt: skip
    """Of a step: q, k [hk, dk]; v, out [hv, dv]; log_decay [hv, dk] or [1, hv]; beta [1, hv]; `states` are whole.

    Made ready, twice: `columns`, keys (and decays) for `spread`; `queries` [dk, hk]; `overlaps`, k . q, [hk, dv].
    """
    (heads, value_dim), (keys, key_dim) = v.shape, k.shape
    per_channel = log_decay.shape == (heads, key_dim)
    spread = _spread(keys, heads, per_channel, value_dim)

    def slot(states, slots):
        return lambda row, heads: states.at[layer[0], slots[row], heads]

    def prepare(buffer):
        query, key = normalised(q[...]) * key_dim**-0.5, normalised(k[...])
        decays = [jnp.exp(log_decay[...].astype(jnp.float32))] if per_channel else []
        columns[buffer] = spread.columns([key, *decays])
        queries[buffer] = query.T
        overlaps[buffer] = jnp.broadcast_to((query * key).sum(axis=1, keepdims=True), overlaps.shape[1:])

    def work(buffer, state):
        values = v[...].astype(jnp.float32)
        for head in range(heads):
            key_head = head * keys // heads
            picks = (key_head, head) if per_channel else (key_head,)
            if per_channel or head % (heads // keys) == 0:
                key, *decays = spread(columns[buffer], picks)
                query = queries[buffer, :, key_head : key_head + 1]
            (decay,) = decays if per_channel else [jnp.exp(jnp.full((1, value_dim), log_decay[0, head]))]
            S = decay * state[head].astype(jnp.float32)
            u = beta[0, head] * (values[head : head + 1] - (key * S).sum(axis=0, keepdims=True))
            seen = (query * S).sum(axis=0, keepdims=True)
            out[head : head + 1] = seen + overlaps[buffer, key_head : key_head + 1] * u
            state[head] = (S + key * u).astype(state.dtype)

    steps.run(slot(states, read_slots), slot(new_states, write_slots), scratch, prepare, work)
