"""Mamba-2's prefill on TPU with the states of requested boundaries: around the kernel of `tpu_prefill.py`.

All states of the pool are whole to this kernel, and go to their slots by copies. A state within a chunk takes the part
of the chunk's work that the state has: the decays up to there, and one product a pair of heads.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_sums
from pallas_kernels.tpu_sums import CHUNK
from pallas_kernels.tpu_vectors import Dot


def kernel(
    plain: Callable[..., None], checkpoints: int, layer, read_slots, write_slots, lengths, checkpoint_lengths,
    checkpoint_slots, dt, x, first_dt, next_dt, A, B, C, D, ones, selector, state, out, new_states, h, *scratch,
) -> None:  # fmt: skip
    """`plain` is the kernel without checkpoints, `dt` the chunk's own; the other references are as of `plain`, and
    behind its `sums` one for states on their way out [heads P, N] and its semaphore."""
    *sums, kept, semaphore = scratch
    row, block, chunk = (pl.program_id(axis) for axis in range(3))
    left = lengths[row] - chunk * CHUNK
    lanes = h.shape[2]

    def write(slot):
        rows = pl.ds(block * len(kept), len(kept))
        copy = pltpu.make_async_copy(kept, new_states.at[layer[0], slot, rows], semaphore)
        copy.start()
        copy.wait()

    @pl.when(chunk == 0)
    def _():
        for pair in range(len(h)):
            h[pair] = state[pair * lanes : (pair + 1) * lanes].astype(jnp.float32).T

    @pl.loop(row * checkpoints, (row + 1) * checkpoints)
    def _(number):
        valid = checkpoint_lengths[number] - chunk * CHUNK

        @pl.when((valid > 0) & (valid <= CHUNK))
        def _():
            _keep(valid, x, tpu_sums.by_pair(dt, chunk), A[...], B, ones[...], h, kept)
            write(checkpoint_slots[number])

    plain(
        layer, read_slots, write_slots, lengths, x, first_dt, next_dt, A, B, C, D, ones, selector, state, out, kept, h,
        *sums,
    )  # fmt: skip

    @pl.when((left <= CHUNK) & ((left > 0) | (chunk == 0)))
    def _():
        write(write_slots[row])


def _keep(valid, x, dt, A, B, ones, h, kept: Any) -> None:
    """kept <- the states after the first `valid` tokens of the chunk that starts at h."""
    pairs, width, lanes = h.shape
    exact = x.dtype == jnp.float32
    dt = jnp.where(tpu_sums.valid_lanes(valid), dt, 0)
    *_, after, total = tpu_sums.compute(dt * A, dt, ones, exact)
    dot, per_group = Dot(exact), pairs * width // B.shape[1]
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, lanes), axis) for axis in (0, 1))
    masks = [(row < valid) & (lane // (lanes // 2) == head) for head in range(2)]
    columns = []
    for first in range(0, B.shape[1], width):
        b = jnp.where(row[:, :1] < valid, B[:, first : first + width].astype(jnp.float32), 0)
        columns.append(jnp.concatenate([b, b]).T)
    for pair in range(pairs):
        channels = slice(pair * lanes, (pair + 1) * lanes)
        of_each_head = jnp.concatenate([jnp.where(mask, x[:, channels], 0) for mask in masks])
        added = dot(columns[pair // per_group] * after[pair : pair + 1], of_each_head)
        kept[channels] = (total[pair : pair + 1] * h[pair] + added).T.astype(kept.dtype)
