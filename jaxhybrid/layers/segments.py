"""Where a layer schedule repeats itself, so that depth can be a scan instead of more program."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxhybrid.config import LayerSpec

MAX_PERIOD = 12  # Kimi K3 repeats itself every 12 layers: three times its mixers, once its residual blocks


@dataclass(frozen=True)
class SegmentPlan:
    """Layers first .. first + period * repeats - 1: `pattern` repeated `repeats` times."""

    first: int
    pattern: tuple[LayerSpec, ...]
    repeats: int

    @property
    def layers(self) -> int:
        return len(self.pattern) * self.repeats


def plan_segments(layers: Sequence[LayerSpec], scan: bool) -> tuple[SegmentPlan, ...]:
    """Splits a schedule into repeated patterns, longest cover first; one layer a segment if `scan` is off.

    Kimi Linear's 27 layers become its dense first one, six repeats of four layers, and the two that are left.
    """
    plans: list[SegmentPlan] = []
    at = 0
    while at < len(layers):
        period, repeats = _best_period(layers, at) if scan else (1, 1)
        plans.append(SegmentPlan(at, tuple(layers[at : at + period]), repeats))
        at += period * repeats
    return tuple(plans)


def _best_period(layers: Sequence[LayerSpec], at: int) -> tuple[int, int]:
    """The period and repeat count that cover most layers from `at` on; (1, 1) if nothing repeats."""
    best = (1, 1)
    for period in range(1, MAX_PERIOD + 1):
        pattern, repeats = layers[at : at + period], 1
        while layers[at + period * repeats : at + period * (repeats + 1)] == pattern:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best
