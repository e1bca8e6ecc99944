"""Forking children off a long parent and running each child's first step, against a deep copy of the bundle per child.

A deep copy of all state on every hit is what a cache without shared structure does. Counted: bytes of recurrent state
and of KV pages that moved. Timed in one run: fork and first step, and copy and first step.

python scripts/bench_branch.py --length=16400 --children=64
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from jaxhybrid.command_line import run

if TYPE_CHECKING:
    import jaxhybrid as jh

MODEL = flags.DEFINE_string("model", None, "Checkpoint folder; the embedded demo model if none is named.")
LENGTH = flags.DEFINE_integer("length", 16400, "Tokens of the parent; the last page is then partly filled.")
CHILDREN = flags.DEFINE_integer("children", 64, "Children.")
REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs after one untimed; the median counts.")


def main(_: list[str]) -> None:
    import numpy as np

    import jaxhybrid as jh
    from jaxhybrid.traces.job import demo_folder

    model = jh.load_model(Path(MODEL.value) if MODEL.value else demo_folder())
    config = jh.EngineConfig(
        max_sequences=CHILDREN.value + 1, max_tokens=LENGTH.value + 64 * (2 * CHILDREN.value + 2),
        max_context=LENGTH.value + 64, max_checkpoints=4, retention=jh.Retention(), prefill_chunks=(512,),
        row_buckets=(CHILDREN.value + 1,), steps_per_dispatch=1,
    )  # fmt: skip
    engine = jh.Engine(model, config)
    parent = engine.prefill(np.random.default_rng(0).integers(3, model.config.vocab_size, LENGTH.value))
    before = engine.stats()
    first = branch(engine, parent)[1]
    after = engine.stats()
    page = model.layout.bytes_per_token * config.page_size
    copied = (after.kv_bytes_copied - before.kv_bytes_copied) / CHILDREN.value
    recurrent = after.recurrent_bytes_copied - before.recurrent_bytes_copied
    millions = model.parameter_count / 1e6
    print(f"{CHILDREN.value} children of a parent of {LENGTH.value} tokens, {millions:.1f} M parameters")
    print(f"recurrent bytes copied: {recurrent}; KV bytes copied per child: {copied:.0f}, one page is {page}")
    assert first == branch(engine, parent)[1], "the same step gave other tokens"
    fork_s = median(lambda: branch(engine, parent)[0])
    shared_s = median(lambda: elapsed(lambda: branch(engine, parent)))
    copy_s = median(lambda: elapsed(lambda: deep_copies(engine, parent)))
    print(f"fork: {fork_s / CHILDREN.value * 1e6:.0f} us a child; fork and first step of all: {shared_s * 1e3:.1f} ms")
    print(f"deep copies and the same first step: {(copy_s + shared_s) * 1e3:.1f} ms")
    print(f"forks against deep copies, first step included: {(copy_s + shared_s) / shared_s:.2f} times faster")


def branch(engine: "jh.Engine", parent: "jh.Sequence") -> tuple[float, list[tuple[int, ...]]]:
    """Seconds that the forks alone took, and the first token of each child."""
    import jaxhybrid as jh

    started = time.perf_counter()
    children = [parent.fork() for _ in range(CHILDREN.value)]
    forked = time.perf_counter() - started
    made = engine.generate(children, jh.Sampling(max_tokens=1))
    for child in children:
        child.release()
    return forked, [generation.tokens for generation in made]


def deep_copies(engine: "jh.Engine", parent: "jh.Sequence") -> None:
    """A private copy of everything the parent's bundle names, for every child."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    bundle = parent.bundle
    pages = np.array(bundle.pages, np.int32)
    paged = {(leaf.group, leaf.name) for leaf in engine.model.layout.paged}

    def copy(pool: dict) -> list:
        return [
            jnp.copy(leaf[:, pages] if (group, name) in paged else leaf[:, bundle.slot])
            for group, leaves in pool.items()
            for name, leaf in leaves.items()
        ]

    engine._memory.read(lambda pool: [jax.block_until_ready(copy(pool)) for _ in range(CHILDREN.value)])


def elapsed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def median(seconds: Callable[[], float]) -> float:
    return statistics.median([seconds() for _repeat in range(REPEATS.value + 1)][1:])


if __name__ == "__main__":
    run(main)
