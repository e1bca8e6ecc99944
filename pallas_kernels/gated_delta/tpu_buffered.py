"""Buffered decode of the gated delta rule on TPU: states are read at each step, and written at one in W.

A grid step takes one row and a block of its value heads. The pipeline fetches states and ring from the row's read slot.
What is written goes by copies that a later step waits for: the token's record at each step, the state only where the
ring is full. (A pipelined output would be written at each step.) Steps of a core run in order, rows in two halves for
parts with two cores, so that each core knows its last step and waits there for what is still on its way.

States meet the token on the vector unit as in a decode step, but for both products at once and without an update.
Records are [W, heads, width], and the token against them is elementwise work: sums along lanes, then sums of rows.
Value heads that share a key head are taken in turns, so that no key has to be repeated.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.tpu_decode import accepts_widths
from pallas_kernels.tpu_vectors import Columns, fold, normalised

# States of one grid step: all that a row has of most models, whose token and ring are then worked on together.
BLOCK_BYTES = 1 << 21
# A ring's work is unrolled, and folded as one product of the matrix unit.
MAX_RING = 16


def accepts(q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, ring_k: Array, *_: Any):
    """Why the kernel cannot run these arguments of `buffered`, or None."""
    if refusal := accepts_widths(q.shape[3], v.shape[3]):
        return refusal
    if ring_k.shape[2] > MAX_RING:
        return f"a ring of {ring_k.shape[2]} records is more than {MAX_RING}"
    return None


def heads_per_block(key_heads: int, groups: int, state_bytes: int) -> int:
    """Value heads of a grid step: of whole sublane tiles of key heads, or of all; about `BLOCK_BYTES` of states."""
    whole = [n for n in range(1, key_heads + 1) if key_heads % n == 0 and (n % 8 == 0 or n == key_heads)]
    fitting = [n for n in whole if n * groups * state_bytes <= BLOCK_BYTES]
    return groups * (max(fitting) if fitting else min(whole))


def buffered(
    q: Float[Array, "B 1 Hk dk"],
    k: Float[Array, "B 1 Hk dk"],
    v: Float[Array, "B 1 Hv dv"],
    log_decay: Float[Array, "B 1 Hv"] | Float[Array, "B 1 Hv dk"],
    beta: Float[Array, "B 1 Hv"],
    state: Float[Array, "L N Hv dk dv"],
    ring_k: Float[Array, "L N W Hk dk"],
    ring_u: Float[Array, "L N W Hv dv"],
    ring_log_decay: Float[Array, "L N W Hv"] | Float[Array, "L N W Hv dk"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    cursors: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array, Array]:
    """As `pallas_kernels.gated_delta.buffered.buffered`; `interpret` as of `pallas_call`."""
    batch, _, value_heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    groups, width = value_heads // key_heads, ring_k.shape[2]
    size = heads_per_block(key_heads, groups, key_dim * value_dim * state.dtype.itemsize)
    blocks, keys = value_heads // size, size // groups
    per_channel = log_decay.ndim == 4
    halves = 2 - batch % 2
    rows = batch // halves

    def block_spec(shape, index):
        return pl.BlockSpec(shape, lambda half, row, block, *scalars: index(half * rows + row, block, *scalars))

    def vectors(heads, dim):
        return block_spec((None, None, heads, dim), lambda row, block, *_: (row, block, 0, 0))

    def ring_block(heads, dim):
        return block_spec(
            (1, 1, width, heads, dim), lambda row, block, layer, read, *_: (layer[0], read[row], 0, block, 0)
        )

    def ring_scalars(which):
        return block_spec(
            (1, 1, width, value_heads), lambda row, block, layer, *slots: (layer[0], slots[which][row], 0, 0)
        )

    scalars = block_spec((None, 1, value_heads), lambda row, block, *_: (row, 0, 0))
    states = block_spec(
        (1, 1, size, key_dim, value_dim), lambda row, block, layer, read, *_: (layer[0], read[row], block, 0, 0)
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    split = lambda x: x.reshape(batch, blocks, -1, x.shape[-1])  # noqa: E731
    rings = (ring_k, ring_u, ring_log_decay)
    record_shapes = [(keys, key_dim), (size, value_dim), *([(size, key_dim)] if per_channel else [])]
    elements = batch * value_heads * key_dim * value_dim
    out, state, *rings = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(halves, rows, blocks),
            in_specs=[
                vectors(keys, key_dim),
                vectors(keys, key_dim),
                vectors(size, value_dim),
                vectors(size, key_dim) if per_channel else scalars,
                scalars,
                states,
                ring_block(keys, key_dim),
                ring_block(size, value_dim),
                ring_block(size, key_dim) if per_channel else ring_scalars(0),
            ],
            out_specs=[
                vectors(size, value_dim), anywhere, anywhere, anywhere, anywhere if per_channel else ring_scalars(1)
            ],
            scratch_shapes=[
                _Scratch(
                    tuple(pltpu.VMEM((2, *shape), jnp.float32) for shape in record_shapes),
                    pltpu.SemaphoreType.DMA((2, len(record_shapes))),
                    pltpu.VMEM((2, size, value_dim), jnp.float32),
                    pltpu.VMEM((size, key_dim, value_dim), state.dtype),
                    pltpu.SMEM((1,), jnp.int32),
                    pltpu.SemaphoreType.DMA((2,)),
                )
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, blocks, size, value_dim), jnp.float32),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (state, *rings)),
        ],
        input_output_aliases={10: 1, 11: 2, 12: 3, 13: 4},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=elements * 4 + batch * width * value_heads * (key_dim + value_dim) * 4,
            transcendentals=log_decay.size * (width + 1),
            bytes_accessed=(elements + elements // width) * state.dtype.itemsize
            + sum(batch * (x.size // x.shape[0] // x.shape[1]) * 4 * (width + 1) // width for x in rings)
            + sum(x.size * x.dtype.itemsize for x in (q, k, v, log_decay, beta))
            + v.size * 4,
        ),
        interpret=interpret,
        name="gated_delta_buffered",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(x.astype(jnp.int32) for x in (read_slots, write_slots, cursors, lengths)),
        *map(split, (q, k, v.astype(jnp.float32))),
        split(log_decay.astype(jnp.float32)) if per_channel else log_decay.astype(jnp.float32),
        beta.astype(jnp.float32),
        state,
        *rings,
    )  # fmt: skip
    return out.reshape(v.shape), state, *rings


class _Scratch(NamedTuple):
    """`records`: a step's record, twice, each with its semaphores `sent`. `seen`: states times keys and queries.
    `folded`: states on their way out, if `writing`, by the first of two semaphores; the other is for forks."""

    records: tuple[Any, ...]
    sent: Any
    seen: Any
    folded: Any
    writing: Any
    moved: Any


def _kernel(
    layer, read_slots, write_slots, cursors, lengths, q, k, v, log_decay, beta, state, ring_k, ring_u, ring_log_decay,
    out, states, rings_k, rings_u, rings_log_decay, scratch,
):  # fmt: skip
    """Blocks: q, k [hk, dk]; v, out [hv, dv]; log_decay [hv, dk] or [1, Hv]; beta [1, Hv]; state [hv, dk, dv]; rings
    [W, heads, width], or [W, Hv]. `states`, `rings_k`, `rings_u` are whole, `rings_log_decay` too if per channel."""
    # As blocks they keep two dimensions of 1: a copy from a block without would not compile.
    state, ring_k, ring_u, ring_log_decay = (x.at[0, 0] for x in (state, ring_k, ring_u, ring_log_decay))
    half, place, block = (pl.program_id(axis) for axis in range(3))
    row, step = half * pl.num_programs(1) + place, place * pl.num_programs(2) + block
    last = step == pl.num_programs(1) * pl.num_programs(2) - 1
    buffer, slot, cursor = jax.lax.rem(step, 2), write_slots[row], cursors[row]
    valid, fork = lengths[row] > 0, read_slots[row] != slot
    full = valid & (cursor == ring_k.shape[0] - 1)
    per_channel = log_decay.shape == (len(v), k.shape[1])
    rings = (rings_k, rings_u, rings_log_decay)[: len(scratch.records)]

    def own_heads(ring, heads):
        return ring if ring.shape[-2] == heads else ring.at[..., pl.ds(pl.multiple_of(block * heads, 8), heads), :]

    def append(buffer):
        return [
            pltpu.make_async_copy(
                record.at[buffer], own_heads(ring.at[layer[0], slot, cursor], record.shape[1]),
                scratch.sent.at[buffer, number],
            )
            for number, (record, ring) in enumerate(zip(scratch.records, rings, strict=True))
        ]  # fmt: skip

    heads = pl.ds(block * state.shape[0], state.shape[0])
    write = pltpu.make_async_copy(scratch.folded, states.at[layer[0], slot, heads], scratch.moved.at[0])

    @pl.when(step == 0)
    def _():
        scratch.writing[0] = 0

    @pl.when(step >= 2)
    def _():
        _wait(append(buffer))

    token = _Token(q, k, v, log_decay, beta, valid, block)
    new_ring = None if per_channel else rings_log_decay.at[0, 0]
    _attend(token, state, (ring_k, ring_u, ring_log_decay), cursor, out, new_ring, scratch, buffer)

    @pl.when(fork & jnp.logical_not(full))
    def _():
        blocks = (ring_k, ring_u, ring_log_decay)[: len(rings)]
        copies = [pltpu.make_async_copy(state, states.at[layer[0], slot, heads], scratch.moved.at[1])] + [
            pltpu.make_async_copy(source, own_heads(ring.at[layer[0], slot], source.shape[1]), scratch.moved.at[1])
            for source, ring in zip(blocks, rings, strict=True)
        ]
        for copy in copies:
            copy.start()
        _wait(copies)

    for copy in append(buffer):
        copy.start()

    @pl.when(full)
    def _():
        @pl.when(scratch.writing[0] == 1)
        def _():
            write.wait()

        _fold(token, state, (ring_k, ring_u, ring_log_decay), scratch, buffer)
        write.start()
        scratch.writing[0] = 1

    @pl.when(last)
    def _():
        _wait(append(buffer))

        @pl.when(step >= 1)
        def _():
            _wait(append(1 - buffer))

        @pl.when(scratch.writing[0] == 1)
        def _():
            write.wait()


def _wait(copies):
    for copy in copies:
        copy.wait()


class _Token:
    """A row's token, 0 on padding. Value heads come in as many turns as share a key head, one of each group a turn."""

    def __init__(self, q, k, v, log_decay, beta, valid, block) -> None:
        self.heads, self.keys = len(v), len(k)
        self.turns = self.heads // self.keys
        self.per_channel = log_decay.shape == (len(v), k.shape[1])
        self._block = block
        self._v, self._log_decay, self._beta = v, log_decay, beta
        self._valid = valid
        self.q, self.k = (normalised(self._masked(x[...])) for x in (q, k))
        self.q = self.q * k.shape[1] ** -0.5

    def _masked(self, x):
        return jnp.where(self._valid, x.astype(jnp.float32), 0)

    def rows(self, turn: int):
        """Of the value heads of a turn, in an array of all."""
        return pl.ds(turn, self.keys, stride=self.turns) if self.turns > 1 else slice(None)

    def column(self, x, turn: int):
        """[hk, 1]: the turn's heads of a row [1, Hv] of all blocks' heads."""
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, (self.keys, x.shape[1]), axis) for axis in (0, 1))
        chosen = lane == self._block * self.heads + row * self.turns + turn
        return jnp.where(chosen, x, 0).sum(axis=1, keepdims=True)

    def head_column(self, rows, head: int):
        """[n, 1]: one head of n rows of all blocks' heads."""
        lane = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1)
        return jnp.where(lane == self._block * self.heads + head, rows, 0).sum(axis=1, keepdims=True)

    def v(self, turn: int):
        return self._masked(self._v[self.rows(turn), :])

    def beta(self, turn: int):
        return self.column(self._masked(self._beta[...]), turn)

    def log_decay(self, turn: int):
        """[hk, dk] or [hk, 1]."""
        if self.per_channel:
            return self._masked(self._log_decay[self.rows(turn), :])
        return self.column(self.log_decay_row(), turn)

    def log_decay_row(self):
        """[1, Hv]."""
        return self._masked(self._log_decay[...])


def _attend(token, state, ring, cursor, out, new_ring_log_decay, scratch, buffer):
    """The token's output and its record."""
    ring_k, ring_u, ring_log_decay = ring
    size = ring_k.shape[0]
    keys = [jnp.where(i < cursor, ring_k[i], 0) for i in range(size)]
    products = []
    if not token.per_channel:
        products = [[(x * key).sum(axis=1, keepdims=True) for x in (token.k, token.q)] for key in keys]
    turns = []
    for turn in range(token.turns):
        total = token.log_decay(turn)
        sums = [0.0, 0.0]
        for i in reversed(range(size)):
            decay, used = jnp.exp(total), i < cursor
            update = jnp.where(used, ring_u[i, token.rows(turn), :], 0)
            if token.per_channel:
                key, decays = keys[i] * decay, jnp.where(used, ring_log_decay[i, token.rows(turn), :], 0)
                scores = [(x * key).sum(axis=1, keepdims=True) for x in (token.k, token.q)]
            else:
                scores = [x * decay for x in products[i]]
                decays = token.column(jnp.where(used, ring_log_decay[i : i + 1, :], 0), turn)
            sums = [total + score * update for total, score in zip(sums, scores, strict=True)]
            total = total + decays
        turns.append((jnp.exp(total), sums))
    _multiply(token, state, [before for before, _ in turns], scratch.seen)
    overlap = (token.q * token.k).sum(axis=1, keepdims=True)
    new_k, new_u, *new_log_decay = scratch.records
    new_k[buffer] = token.k
    for turn, (before, sums) in enumerate(turns):
        rows = token.rows(turn)
        scale = 1.0 if token.per_channel else before
        from_k, from_q = (scratch.seen[i, rows, :] * scale + sums[i] for i in range(2))
        u = token.beta(turn) * (token.v(turn) - from_k)
        new_u[buffer, rows, :] = u
        out[rows, :] = from_q + overlap * u
        if new_log_decay:
            new_log_decay[0][buffer, rows, :] = token.log_decay(turn)
    if new_ring_log_decay is not None:
        row = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        new_ring_log_decay[...] = jnp.where(row == cursor, token.log_decay_row(), ring_log_decay[...])


def _multiply(token, state, befores, seen):
    """seen[0], seen[1] <- S^T k, S^T q for each head, each row of S scaled by `befores` if that has key channels."""
    width = state.shape[2]
    if token.per_channel:
        columns = [Columns([token.k * before, token.q * before], width) for before in befores]
    else:
        columns = [Columns([token.k, token.q], width)]
    for key in range(token.keys):
        spread = [one(key, key) for one in columns]
        for turn in range(token.turns):
            head = key * token.turns + turn
            S = state[head].astype(jnp.float32)
            for number, column in enumerate(spread[turn % len(spread)]):
                seen[number, head : head + 1] = (column * S).sum(axis=0, keepdims=True)


def _fold(token, state, ring, scratch, buffer):
    """folded <- states after the ring's records and the token's, which takes the ring's last place."""
    ring_k, ring_u, ring_log_decay = ring
    new_k, new_u, *new_log_decay = scratch.records
    size = ring_k.shape[0]
    newest = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) == size - 1
    for head in range(token.heads):
        key = head // token.turns
        ks = jnp.where(newest, new_k[buffer, key : key + 1], ring_k[:, key, :])
        us = jnp.where(newest, new_u[buffer, head : head + 1], ring_u[:, head, :])
        if new_log_decay:
            decays = jnp.where(newest, new_log_decay[0][buffer, head : head + 1], ring_log_decay[:, head, :])
        else:
            rows = jnp.where(newest, token.log_decay_row(), ring_log_decay[...])
            decays = token.head_column(rows, head)
        S = fold(state[head].astype(jnp.float32), ks, us, decays)
        scratch.folded[head] = S.astype(scratch.folded.dtype)
