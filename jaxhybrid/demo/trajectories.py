"""Which trajectories are recorded: a handful that ship with the package, and many for the training text."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxhybrid.demo.recorder import Recording
from jaxhybrid.demo.scratch import available_modules
from jaxhybrid.demo.scripted_agent import record
from jaxhybrid.demo.specimens import HELD_OUT

SHIPPED_SEED = 20
TRAINING_SEED = 1


def shipped_trajectories(count: int) -> Iterator[Recording]:
    """Trajectories on held-out modules: no training text contains them or the modules they work on."""
    modules = [name for name in available_modules() if name in HELD_OUT]
    return _record_many("demo", modules, count, SHIPPED_SEED)


def training_trajectories(count: int) -> Iterator[Recording]:
    modules = [name for name in available_modules() if name not in HELD_OUT]
    return _record_many("train", modules, count, TRAINING_SEED)


def _record_many(prefix: str, modules: list[str], count: int, seed: int) -> Iterator[Recording]:
    """`count` recordings at most: a module in which no swap makes a test fail is passed over."""
    for number in range(count):
        rng = random.Random(f"{prefix}-{seed}-{number}")
        module = modules[number % len(modules)]
        others = rng.sample([name for name in modules if name != module], rng.randint(1, 2))
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield record(Path(folder), f"{prefix}-{number}-{module}", module, others, seed)
            except ValueError:
                continue
