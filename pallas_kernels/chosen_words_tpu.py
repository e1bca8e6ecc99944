"""Which keys each query attends to, as the bits of words that a TPU's attention kernel reads beside the keys.

A grid step of that kernel has some query tokens, a power of two of them. Each 128 keys have one word a lane, in so many
rows: bit b of row s is for token s + b * rows. So a bit is where its score will be, and no lane has to move.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.paged_fetch_tpu import LANES

# A product adds up the bits of so many tiles of keys in one float32 number.
_TILES = 16
# Positions of a product; more products than a few are a loop, as the compiler would take minutes.
_PART, _FEW = 512, 4
_LANES_OF_BOTH = (((1,), (1,)), ((), ()))
_SUBLANES = 8


def rows(tokens: int) -> int:
    """Rows of words for each 128 keys and so many tokens: one for one; else whole registers, where tokens fewer than
    their rows come round again."""
    return 1 if tokens == 1 else max(_SUBLANES, tokens // 32)


def fewest_keys(tokens: int) -> int:
    """Keys whose words fill whole tiles."""
    return LANES * _SUBLANES if rows(tokens) == 1 else LANES


def unpack(words, slot, tokens: int, count: int) -> Bool[Array, "count S"]:
    """Which keys each row of a kernel's scores sees: row r is token r % tokens. `words`: of a block, [2, _, 128]."""
    height = rows(tokens)
    tiles = []
    for first in range(0, words.shape[1], height):
        tile = words[slot, first : first + height]
        if height == 1:
            tiles.append(jnp.broadcast_to(tile, (count, LANES)))
            continue
        # Python's 1 << 31 is no int32.
        bits = [tile & jnp.int32((1 << bit) - (1 << 32 if bit == 31 else 0)) for bit in range(max(1, tokens // height))]
        period = max(tokens, height)
        tiles.append(jnp.concatenate(bits * pl.cdiv(count, period))[:count])
    return jnp.concatenate(tiles, axis=1) != 0


def pack(chosen: Int[Array, "B T K"], tokens: int, reach: int, interpret: Any = False) -> Int[Array, "B N _ 128"]:
    """Of the N blocks of `tokens` queries the words of at least `reach` keys, `rows(tokens)` for each 128.

    chosen: distinct positions below `reach`, and -1, in any order.
    """
    batch, length, count = chosen.shape
    blocks, height = pl.cdiv(length, tokens), rows(tokens)
    tiles = _TILES * pl.cdiv(reach, _TILES * LANES)
    chosen = jnp.pad(
        chosen.astype(jnp.int32), ((0, 0), (0, blocks * tokens - length), (0, -count % _PART)), constant_values=-1
    )
    chosen = chosen.reshape(batch * blocks, tokens, -1)
    if 1 < tokens < height:
        chosen = jnp.tile(chosen, (1, height // tokens, 1))
    bits, step = chosen.shape[1] // height, min(height, _SUBLANES)
    chosen = chosen.reshape(batch * blocks, bits, height, -1)
    out = pl.pallas_call(
        functools.partial(_kernel, step),
        grid=(batch * blocks, height // step, bits),
        in_specs=[pl.BlockSpec((None, None, step, chosen.shape[3]), lambda block, row, bit: (block, bit, row, 0))],
        out_specs=pl.BlockSpec((None, tiles, step, LANES), lambda block, row, bit: (block, 0, row, 0))
        if step > 1
        else pl.BlockSpec((None, tiles, LANES), lambda block, row, bit: (block, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((batch * blocks, tiles, *([height] if step > 1 else []), LANES), jnp.int32),
        scratch_shapes=[pltpu.VMEM((tiles // _TILES, *([step] if step > 1 else []), LANES), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * chosen.size * tiles // _TILES * LANES,
            transcendentals=0,
            bytes_accessed=4 * (chosen.size + batch * blocks * tiles * height * LANES),
        ),
        interpret=interpret,
        name="chosen_words",
    )(chosen)
    return out.reshape(batch, blocks, tiles * height, LANES)


def _kernel(step: int, chosen, out, halves):
    """Blocks: chosen [step, K]; out [tiles, step, 128] and halves [tiles / 16, step, 128], or without a step of 1."""
    bit = pl.program_id(2)
    for token in range(step):
        found = _sixteen_tiles(chosen, token, halves.shape[0])
        if step == 1:
            halves[...] = found
        else:
            halves[:, token, :] = found

    @pl.loop(0, halves.shape[0])
    def _(place):
        first = place * _TILES
        if step == 1:
            word = jnp.broadcast_to(halves[pl.ds(place, 1)], (_TILES, LANES))
            tile = jax.lax.broadcasted_iota(jnp.int32, word.shape, 0)
            out[pl.ds(pl.multiple_of(first, _TILES), _TILES)] = (word >> tile) & 1
            return
        word = halves[place]
        for n in range(_TILES):
            own = ((word >> n) & 1) << bit
            out[first + n] = jnp.where(bit == 0, own, out[first + n] | own)


def _sixteen_tiles(chosen, token: int, count: int) -> Int[Array, "count 128"]:
    """A query's bits: bit b of word w and lane l says whether position (16 w + b) * 128 + l is chosen."""

    def add(index, total):
        part = chosen[token : token + 1, pl.ds(pl.multiple_of(index * _PART, _PART), _PART)]
        tile = part >> 7
        word = jax.lax.broadcasted_iota(jnp.int32, (count, _PART), 0)
        lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, _PART), 0)
        # 2^n for the n-th tile of a word: the product adds up different powers of two, which float32 holds exactly.
        power = jax.lax.bitcast_convert_type((127 + (tile & (_TILES - 1))) << 23, jnp.float32)
        left = jnp.where(word == (tile >> 4), power, 0.0).astype(jnp.bfloat16)
        right = jnp.where(lane == (part & (LANES - 1)), 1.0, 0.0).astype(jnp.bfloat16)
        return total + jax.lax.dot_general(left, right, _LANES_OF_BOTH, preferred_element_type=jnp.float32)

    parts = chosen.shape[1] // _PART
    total = jax.lax.fori_loop(0, parts, add, jnp.zeros((count, LANES), jnp.float32), unroll=parts <= _FEW)
    return total.astype(jnp.int32)
