"""The recurrent operators' forms on update records give on two devices what they give on one, each on its own heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from pallas_kernels.gated_delta import buffered as delta_buffered
from pallas_kernels.gated_delta import gated_delta
from pallas_kernels.gated_delta import records as delta_records
from pallas_kernels.gated_delta import replay as delta_replay
from pallas_kernels.gated_delta import verify as delta_verify
from pallas_kernels.partition import Partition, partitioned
from pallas_kernels.ssd import buffered as ssd_buffered
from pallas_kernels.ssd import records as ssd_records
from pallas_kernels.ssd import replay as ssd_replay
from pallas_kernels.ssd import verify as ssd_verify

pytestmark = pytest.mark.mesh

SLOTS, LENGTHS, CURSORS = jnp.array([1, 2]), jnp.array([3, 2]), jnp.array([0, 0])


def normal(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


def delta():
    def inputs(tokens):
        q, v = normal(2, tokens, 2, 8), normal(2, tokens, 4, 12)
        return q, q[::-1], v, -jnp.abs(normal(2, tokens, 4)), jax.nn.sigmoid(normal(2, tokens, 4))

    state, ring = normal(2, 6, 4, 8, 12), delta_records.make_ring(2, 6, 4, 2, 8, 4, 12, per_channel=False)
    out, records = delta_verify.verify(*inputs(3), state, 1, SLOTS, LENGTHS)
    replayed = delta_replay.replay(records, LENGTHS, state, 1, SLOTS, SLOTS)
    step = delta_buffered.buffered(*inputs(1), state, ring, 1, SLOTS, SLOTS, CURSORS, jnp.array([1, 1]))
    checkpoints = {"checkpoint_lengths": jnp.array([[1], [2]]), "checkpoint_slots": jnp.array([[3], [4]])}
    return out, records, replayed, step, gated_delta(*inputs(3), state, 1, SLOTS, SLOTS, LENGTHS, **checkpoints)


def ssd():
    def inputs(tokens):
        B = normal(2, tokens, 2, 8)
        return normal(2, tokens, 4, 6), jnp.abs(normal(2, tokens, 4)), -jnp.exp(normal(4)), B, B[::-1], normal(4)

    state, ring = normal(2, 6, 4, 6, 8), ssd_records.make_ring(2, 6, 4, 4, 6, 2, 8)
    out, records = ssd_verify.verify(*inputs(3), state, 1, SLOTS, LENGTHS)
    replayed = ssd_replay.replay(records, LENGTHS, state, 1, SLOTS, SLOTS)
    step = ssd_buffered.buffered(*inputs(1), state, ring, 1, SLOTS, SLOTS, CURSORS, jnp.array([1, 1]))
    return out, records, replayed, step


@pytest.mark.parametrize("run", [delta, ssd])
def test_each_device_has_its_own_heads(run) -> None:
    partition = Partition(Mesh(np.array(jax.devices()[:2]), ("model",)), (("heads", ("model",)),))
    whole = jax.jit(lambda: run())()
    with partitioned(partition):
        split = jax.jit(lambda: run())()
    for got, right in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        assert "model" in got.sharding.spec
        np.testing.assert_allclose(got, right, atol=2e-6)
