"""Mamba-1's recurrence on TPU: channels along lanes, the numbers of their states along sublanes.

Decode: eight rows share a block of inputs, and take a step each for their states, which move from the row's read slot
to VMEM and to its write slot of the same array. Prefill: the grid is rows x blocks of channels x chunks of tokens,
chunks innermost, with the state in VMEM from a row's first chunk to its last. Tokens are taken eight at a time, which
fill the sublanes of inputs and outputs; octets beyond a row's length are not computed.

Every number of the state has a decay of its own, so the state is float32 arithmetic on the vector unit. What is written
of B is the same for all channels, and spread along lanes once. Only what C reads of the states of eight tokens is a
matrix product, which takes them as bfloat16 where x came as bfloat16.

The next row's states are fetched while this row's are computed. That is why no row may write a slot that another row
reads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

_LANES = 128
# Rows of a sublane tile: tokens, or rows of a batch, whose inputs and outputs are taken together.
_TILE = 8
_LOG2_E = 1.4426950408889634
# Bytes of a state's block in decode; channels of a block, tokens of a chunk in prefill.
_BLOCK_BYTES = 1 << 20
_CHANNELS, CHUNK = 2048, 128


def accepts(x: Array, dt: Array, A: Array, *_: Array) -> str | None:
    """Why the kernels cannot run these arguments of `selective_scan`, or None."""
    numbers, channels = A.shape
    if channels % _LANES:
        return f"{channels} channels are not a multiple of {_LANES}"
    if numbers % _TILE:
        return f"state_size {numbers} is not a multiple of {_TILE}"
    return None


def selective_scan(
    x: Float[Array, "B T E"],
    dt: Float[Array, "B T E"],
    A: Float[Array, "N E"],
    B: Float[Array, "B T N"],
    C: Float[Array, "B T N"],
    D: Float[Array, " E"],
    state: Float[Array, "L S N E"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "B T E"], Float[Array, "L S N E"]]:
    """Arguments and result as in `pallas_kernels.selective_scan.selective_scan`; `interpret` as of `pallas_call`."""
    constants = (A.astype(jnp.float32) * _LOG2_E, D.astype(jnp.float32)[None])
    slots = (
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(v.astype(jnp.int32) for v in (read_slots, write_slots, lengths)),
    )
    if x.shape[1] > 1:
        return _prefill((x, dt), (B, C), constants, state, slots, interpret)
    out, state = _decode((x[:, 0], dt[:, 0]), (B[:, 0], C[:, 0]), constants, state, slots, interpret)
    return out[:, None], state


def grid_steps(batch: int, tokens: int, channels: int, state_size: int) -> tuple[int, int, tuple[int, ...]]:
    """Of the kernel for such a call; how often a row's, or eight rows', first step comes up; and octets, in all."""
    blocks = channels // block_channels(tokens, channels, state_size)
    if tokens == 1:
        octets = pl.cdiv(batch, _TILE)
        return octets * blocks * min(batch, _TILE), octets * blocks, ()
    return batch * blocks * pl.cdiv(tokens, CHUNK), batch * blocks, (batch * blocks * pl.cdiv(tokens, _TILE),)


def block_channels(tokens: int, channels: int, state_size: int) -> int:
    """Channels of a grid step."""
    most = _BLOCK_BYTES // (4 * state_size) if tokens == 1 else _CHANNELS
    return _divisor(channels, most)


def _divisor(channels: int, most: int) -> int:
    """The largest number of channels, whole lane tiles, that divides them and is not above `most`, if any is."""
    return max((n for n in range(_LANES, channels + 1, _LANES) if channels % n == 0 and n <= most), default=_LANES)


def _cost(x: Array, state: Array) -> pl.CostEstimate:
    numbers, channels = state.shape[2:]
    return pl.CostEstimate(
        flops=7 * x.size * numbers,
        transcendentals=x.size * numbers,
        bytes_accessed=2 * x.shape[0] * numbers * channels * state.dtype.itemsize
        + x.size * (x.dtype.itemsize + 8)
        + (numbers + 1) * channels * 4
        + 2 * x.size // channels * numbers * 4,
    )


def _decode(inputs, vectors, constants, state, slots, interpret):
    x = inputs[0]
    (batch, channels), numbers = x.shape, state.shape[2]
    padding = -batch % _TILE
    # Rows that fill up the last block are padding: they read and write the null slot.
    layer, *rows = (slots[0], *(jnp.pad(column, (0, padding)) for column in slots[1:]))
    inputs, vectors = ([jnp.pad(v, [(0, padding), (0, 0)]) for v in group] for group in (inputs, vectors))
    width = block_channels(1, channels, numbers)
    block = pl.BlockSpec((_TILE, width), lambda octet, part, *_: (octet, part))
    of_rows = pl.BlockSpec((_TILE, numbers), lambda octet, *_: (octet, 0))
    of_channels = [pl.BlockSpec((n, width), lambda octet, part, *_: (0, part)) for n in (numbers, 1)]

    def slot(which):
        return pl.BlockSpec(
            (None, None, numbers, width),
            lambda octet, part, row, layer, *slots: (layer[0], slots[which][octet * _TILE + row], 0, part),
        )

    out, state = pl.pallas_call(
        _decode_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=((batch + padding) // _TILE, channels // width, min(batch, _TILE)),
            in_specs=[block, block, of_rows, of_rows, *of_channels, slot(0)],
            out_specs=[block, slot(1)],
            scratch_shapes=[pltpu.VMEM((width // _LANES, _TILE, _LANES), jnp.float32)] * 3
            + [pltpu.VMEM((_TILE, numbers, _LANES), jnp.float32)] * 2,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch + padding, channels), jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={10: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(x, state),
        interpret=interpret,
        name="selective_scan_decode",
    )(layer, *rows, *inputs, *vectors, *constants, state)
    return out[:batch], state


def _decode_kernel(
    layer,
    read_slots,
    write_slots,
    lengths,
    x,
    dt,
    B,
    C,
    A,
    D,
    state,
    out,
    new_state,
    steps,
    updates,
    outs,
    written,
    read,
):
    """Blocks: x, dt, out [8, E]; B, C [8, N]; A, states [N, E]; D [1, E]; steps, updates, outs
    [tiles, 8, LANES]; written, read [8, N, LANES]."""
    row = pl.program_id(2)
    tiles = [slice(first, first + _LANES) for first in range(0, x.shape[1], _LANES)]

    @pl.when(row == 0)
    def _():
        _spread(B[...], written)
        _spread(C[...], read)
        for tile, here in enumerate(tiles):
            steps[tile] = dt[:, here].astype(jnp.float32)
            updates[tile] = steps[tile] * x[:, here].astype(jnp.float32)

    # A row of padding may hold NaN; its output goes nowhere.
    valid = lengths[pl.program_id(0) * _TILE + row] > 0
    add, get = jnp.where(valid, written[row], 0), read[row]
    for tile, here in enumerate(tiles):
        step, update = (jnp.where(valid, v[tile, pl.ds(row, 1)], 0) for v in (steps, updates))
        h = jnp.exp2(step * A[:, here]) * state[:, here].astype(jnp.float32) + update * add
        new_state[:, here] = h.astype(new_state.dtype)
        outs[tile, pl.ds(row, 1)] = (h * get).sum(axis=0, keepdims=True)

    @pl.when(row == pl.num_programs(2) - 1)
    def _():
        for tile, here in enumerate(tiles):
            out[:, here] = outs[tile] + D[:, here] * x[:, here].astype(jnp.float32)


def _spread(rows: Float[Array, "8 N"], columns: Any) -> None:
    """Writes each row's numbers along sublanes, the same in all lanes: columns [8, N, LANES]."""
    turned = rows.astype(jnp.float32).T
    for row in range(_TILE):
        columns[row] = jnp.broadcast_to(turned[:, row : row + 1], columns.shape[1:])


class _Read:
    """h . C of eight tokens each, as one product with a block diagonal matrix."""

    def __init__(self, C: Float[Array, "8 N"], exact: bool) -> None:
        token, column = (jax.lax.broadcasted_iota(jnp.int32, (_TILE, C.size), axis) for axis in (0, 1))
        self._dtype = jnp.float32 if exact else jnp.bfloat16
        self._options: dict[str, Any] = {"precision": "highest"} if exact else {}
        of_token = column // C.shape[1] == token
        self._matrix = jnp.where(of_token, jnp.concatenate([C] * _TILE, axis=1), 0).astype(self._dtype)

    def __call__(self, h: list[Float[Array, "N LANES"]]) -> Float[Array, "8 LANES"]:
        states = jnp.concatenate(h).astype(self._dtype)
        return jnp.dot(self._matrix, states, preferred_element_type=jnp.float32, **self._options)


def _prefill(inputs, vectors, constants, state, slots, interpret):
    x = inputs[0]
    (batch, tokens, channels), numbers = x.shape, state.shape[2]
    width = block_channels(tokens, channels, numbers)
    # A last chunk that is not full reaches beyond the arrays; only a block must not be larger than its array.
    padding = max(CHUNK - tokens, 0)
    inputs, vectors = ([jnp.pad(v, [(0, 0), (0, padding), (0, 0)]) for v in group] for group in (inputs, vectors))

    def current(chunk, lengths, row):
        """The chunk, or the row's last one."""
        return jnp.minimum(chunk, jax.lax.div(jnp.maximum(lengths[row] - 1, 0), CHUNK))

    block = pl.BlockSpec(
        (None, CHUNK, width),
        lambda row, part, chunk, layer, read, write, lengths: (row, current(chunk, lengths, row), part),
    )
    of_tokens = pl.BlockSpec(
        (None, CHUNK, numbers),
        lambda row, part, chunk, layer, read, write, lengths: (row, current(chunk, lengths, row), 0),
    )
    of_channels = [pl.BlockSpec((n, width), lambda row, part, *_: (0, part)) for n in (numbers, 1)]

    def slot(which):
        return pl.BlockSpec(
            (None, None, numbers, width), lambda row, part, chunk, layer, *slots: (layer[0], slots[which][row], 0, part)
        )

    out, state = pl.pallas_call(
        _prefill_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, channels // width, pl.cdiv(tokens, CHUNK)),
            in_specs=[block, block, of_tokens, of_tokens, *of_channels, slot(0)],
            out_specs=[block, slot(1)],
            scratch_shapes=[pltpu.VMEM((numbers, width), jnp.float32)]
            + [pltpu.VMEM((width // _LANES, _TILE, _LANES), jnp.float32)] * 2
            + [pltpu.VMEM((_TILE, numbers, _LANES), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, tokens + padding, channels), jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={10: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(x, state),
        interpret=interpret,
        name="selective_scan_prefill",
    )(*slots, *inputs, *vectors, *constants, state)
    return out[:, :tokens], state


def _prefill_kernel(
    layer, read_slots, write_slots, lengths, x, dt, B, C, A, D, state, out, new_state, h, steps, updates, written
):
    """Blocks: x, dt, out [CHUNK, E]; B, C [CHUNK, N]; A, h, states [N, E]; D [1, E]; steps, updates
    [tiles, 8, LANES]; written [8, N, LANES]."""
    chunk = pl.program_id(2)
    left = lengths[pl.program_id(0)] - chunk * CHUNK

    @pl.when(chunk == 0)
    def _():
        h[...] = state[...].astype(jnp.float32)

    @pl.loop(0, pl.cdiv(jnp.clip(left, 0, CHUNK), _TILE))
    def _(octet):
        tokens = pl.ds(pl.multiple_of(octet * _TILE, _TILE), _TILE)
        valid = jax.lax.broadcasted_iota(jnp.int32, (_TILE, 1), 0) < left - octet * _TILE
        _spread(jnp.where(valid, B[tokens].astype(jnp.float32), 0), written)
        values = jnp.where(valid, x[tokens].astype(jnp.float32), 0)
        deltas = jnp.where(valid, dt[tokens].astype(jnp.float32), 0)
        read = _Read(C[tokens].astype(jnp.float32), x.dtype == jnp.float32)
        for tile in range(x.shape[1] // _LANES):
            here = slice(tile * _LANES, (tile + 1) * _LANES)
            steps[tile], updates[tile] = deltas[:, here], deltas[:, here] * values[:, here]
        for tile in range(x.shape[1] // _LANES):
            here = slice(tile * _LANES, (tile + 1) * _LANES)
            rates, latest, all_h = A[:, here], h[:, here], []
            for token in range(_TILE):
                step, update = (v[tile, token : token + 1] for v in (steps, updates))
                latest = jnp.exp2(step * rates) * latest + update * written[token]
                all_h.append(latest)
            h[:, here] = latest
            out[tokens, here] = read(all_h) + D[:, here] * values[:, here]

    @pl.when((left <= CHUNK) & ((left > 0) | (chunk == 0)))
    def _():
        new_state[...] = h[...].astype(new_state.dtype)
