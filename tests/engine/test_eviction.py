"""Checkpoints make room for what does not fit otherwise."""

import numpy as np

import jaxhybrid as jh


def test_checkpoints_that_share_every_page_make_room_together(tiny_model: jh.Model):
    config = jh.EngineConfig(
        max_sequences=1, max_tokens=24, page_size=8, max_checkpoints=8, prefill_chunks=(16,),
        retention=jh.Retention(),
    )  # fmt: skip
    engine = jh.Engine(tiny_model, config)
    first = np.arange(1, 13)
    engine.prefill(first, turn_start=10).release()
    stats = engine.stats()
    # Ends at tokens 10 and 12: the same two pages, so neither checkpoint frees one by going alone.
    assert (stats.retained_checkpoints, stats.live_pages) == (2, 2)

    sequence = engine.prefill(np.arange(20, 44))
    assert sequence.length == 24
    assert engine.stats().events.evictions == 2
