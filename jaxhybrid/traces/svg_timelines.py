"""Plots along a run: state memory by kind over time, and the branches of a trajectory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from jaxhybrid.traces import units
from jaxhybrid.traces.record import CallRecord, MemorySample
from jaxhybrid.traces.summary import by_trajectory
from jaxhybrid.traces.svg_canvas import Panel, Scale, drawing, element, line, path, stacked_bar, text, tooltip
from jaxhybrid.traces.svg_plots import TOKEN_KINDS, Figure, whole

MAX_SAMPLES = 240
MAX_KINDS = 7
MAX_LANES = 12
MAX_TREES = 3


@dataclass(frozen=True)
class Lane:
    """One branch of a trajectory: its calls, and the call that it left (None: it began afresh)."""

    name: str
    calls: tuple[CallRecord, ...]
    parent: int | None
    depth: int


def memory(samples: Sequence[MemorySample]) -> Figure:
    """Stacked areas of bytes by kind, and under them the counts of live sequences and checkpoints."""
    if not samples:
        return Figure("memory", "State memory over time", "Memory was not sampled.")
    samples = _thin(sorted(samples, key=lambda sample: sample.t_s))
    kinds, stacks = _stacks(samples)
    peak = max(samples, key=_total)
    span = (samples[0].t_s, max(samples[-1].t_s, samples[0].t_s + 1e-3))
    area, live, kept = Panel(80, 34, 950, 240), Panel(80, 284, 950, 334), Panel(80, 378, 950, 428)
    x = area.x(*span)
    y = area.y(0, max(1, _total(peak)) * 1.06)
    parts = [area.y_axis(y, units.byte_size, "state on the device"), area.x_axis(x, lambda value: "", wanted=8)]
    base = [0.0] * len(samples)
    for index, kind in enumerate(kinds):
        top = [low + values for low, values in zip(base, stacks[kind], strict=True)]
        edge = [(x(sample.t_s), y(value)) for sample, value in zip(samples, top, strict=True)]
        floor = [(x(sample.t_s), y(value)) for sample, value in zip(samples, base, strict=True)]
        hint = f"{kind}: at most {units.byte_size(max(stacks[kind]))}, {units.byte_size(stacks[kind][-1])} at the end"
        shape = path([*edge, *reversed(floor)], f"area fill-kind{index}", closed=True)
        parts.append(element("g", tooltip(hint), shape))
        base = top
    parts += [
        _held(live, x, samples, [sample.live_sequences for sample in samples], "live"),
        live.x_axis(x, lambda value: ""),
        _held(kept, x, samples, [sample.checkpoints for sample in samples], "kept"),
        kept.x_axis(x, units.seconds, "since the run began"),
    ]
    largest = max(peak.bytes_by_kind, key=lambda kind: peak.bytes_by_kind[kind], default="")
    part = peak.bytes_by_kind.get(largest, 0) / max(1, _total(peak))
    title = f"State peaks at {units.byte_size(_total(peak))}, {units.share(part)} of it {largest}"
    legend = tuple((f"kind{index}", kind) for index, kind in reversed(list(enumerate(kinds))))
    held = f"{units.plural(peak.live_sequences, 'live sequence')} and {units.plural(peak.checkpoints, 'checkpoint')}"
    note = f"At the peak, {units.seconds(peak.t_s)} into the run: {held}."
    return Figure("memory", title, note, legend, drawing(470, "State memory over time", *parts))


def branches(calls: Sequence[CallRecord]) -> Figure:
    """Lanes of calls for the trajectories with most branches: what each call reused, where each branch left another."""
    groups = by_trajectory(calls)
    if not groups:
        return Figure("branches", "Branches", "No call was replayed.")
    forks = [fork for group in groups.values() for fork in _forks(group)]
    ranked = sorted(groups.items(), key=lambda item: (-len({call.branch for call in item[1]}), -len(item[1])))
    trees = [item for item in ranked if _forks(item[1])][:MAX_TREES] or ranked[:1]
    parts: list[Markup] = []
    top = 24.0
    for name, group in trees:
        tree, top = _tree(name, group, top)
        parts.append(tree)
    if not forks:
        title = "No trajectory branches: every call continues the one before"
    else:
        prompt, resumed = sum(fork.prompt_tokens for fork in forks), sum(fork.resumed for fork in forks)
        title = (
            f"{units.plural(len(forks), 'branch')} left a known path and started with "
            f"{units.share(resumed / max(1, prompt))} of their prompts reused"
        )
    note = (
        "One lane a branch, one bar a call in order of the trace, as tall as its prompt; "
        "a curve leads from the call a branch left to its first call."
    )
    if len(trees) < len(groups):
        note += f" The {units.plural(len(trees), 'trajectory')} with most branches of {len(groups)}."
    return Figure("branches", title, note, TOKEN_KINDS[:3], drawing(top, "Branches by trajectory", *parts))


def _thin(samples: Sequence[MemorySample]) -> list[MemorySample]:
    """Keeps the fullest of each group of neighbours, so that the peak survives, and the last sample."""
    size = math.ceil(len(samples) / MAX_SAMPLES)
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    kept = [max(group, key=_total) for group in groups]
    return kept if kept[-1] is samples[-1] else [*kept, samples[-1]]


def _total(sample: MemorySample) -> int:
    return sum(sample.bytes_by_kind.values())


def _stacks(samples: Sequence[MemorySample]) -> tuple[list[str], dict[str, list[float]]]:
    """Bytes over time by kind, largest kind first; kinds past `MAX_KINDS` share "other"."""
    names = {kind for sample in samples for kind in sample.bytes_by_kind}
    stacks = {kind: [float(sample.bytes_by_kind.get(kind, 0)) for sample in samples] for kind in sorted(names)}
    kinds = sorted(stacks, key=lambda kind: -max(stacks[kind]))
    if len(kinds) <= MAX_KINDS:
        return kinds, stacks
    kept, rest = kinds[: MAX_KINDS - 1], kinds[MAX_KINDS - 1 :]
    other = [sum(values) for values in zip(*(stacks[kind] for kind in rest), strict=True)]
    return [*kept, "other"], {**{kind: stacks[kind] for kind in kept}, "other": other}


def _held(panel: Panel, x: Scale, samples: Sequence[MemorySample], values: Sequence[int], class_: str) -> Markup:
    """A step line of a count, on a scale of its own."""
    y = panel.y(0, max(1, *values) * 1.08)
    points = [(x(sample.t_s), y(value)) for sample, value in zip(samples, values, strict=True)]
    name = "live sequences" if class_ == "live" else "checkpoints"
    return panel.y_axis(y, whole, name, wanted=2) + path(_steps(points), f"trend stroke-{class_}")


def _steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    stairs = [points[0]]
    for (_, before), (x, y) in itertools.pairwise(points):
        stairs += [(x, before), (x, y)]
    return stairs


def _forks(group: Sequence[CallRecord]) -> list[CallRecord]:
    """Calls that do not continue the last call of their own branch, but have a parent."""
    last: dict[str, int] = {}
    found = []
    for call in group:
        if call.parent is not None and last.get(call.branch) != call.parent:
            found.append(call)
        last[call.branch] = call.call
    return found


def _lanes(group: Sequence[CallRecord]) -> list[Lane]:
    """Branches as lanes, each under the one that it left."""
    order = list(dict.fromkeys(call.branch for call in group))
    owned = {name: tuple(call for call in group if call.branch == name) for name in order}
    owner = {call.call: call.branch for call in group}
    parents = {name: owned[name][0].parent for name in order}
    left = {name: owner.get(parent) if parent is not None else None for name, parent in parents.items()}
    lanes: list[Lane] = []
    pending = [(name, 0) for name in reversed(order) if left[name] in (None, name)]
    while pending:
        name, depth = pending.pop()
        lanes.append(Lane(name, owned[name], parents[name], depth))
        pending += [(child, depth + 1) for child in reversed(order) if left[child] == name != child]
    return lanes


def _tree(name: str, group: Sequence[CallRecord], top: float) -> tuple[Markup, float]:
    """One trajectory from `top` down; returns the picture and where the next may begin."""
    lanes = _lanes(group)
    hidden = len(lanes) - MAX_LANES
    if hidden > 0:
        longest = sorted(lanes[1:], key=lambda lane: -len(lane.calls))[: MAX_LANES - 1]
        lanes = [lanes[0], *(lane for lane in lanes[1:] if lane in longest)]
    pitch, tall = 46, 34
    frame = Panel(176, top + 22, 950, top + 22 + pitch * len(lanes))
    position = {call.call: index for index, call in enumerate(group)}
    x = frame.x(-0.5, max(len(group), 8) - 0.5)
    base = {lane.name: frame.top + pitch * (index + 1) - 4 for index, lane in enumerate(lanes)}
    highest = max(1, *(call.prompt_tokens for call in group))
    title = f"{units.shorten(name, 70)}: {units.plural(len(group), 'call')}, tallest {units.compact(highest)} tokens"
    parts = [text(4, top, title, class_="panel-title", hint=name)]
    where = {call.call: (x(position[call.call]), base[call.branch]) for lane in lanes for call in lane.calls}
    for lane in lanes:
        y = Scale(0, highest, base[lane.name], base[lane.name] - tall)
        parts.append(line(frame.left, base[lane.name], frame.right, base[lane.name], "grid"))
        parts.append(_lane_name(lane, base[lane.name]))
        parts += [_call_bar(call, x, y, position[call.call]) for call in lane.calls]
    for fork in _forks(group):
        if fork.parent in where and fork.call in where:
            parts.append(_curve(where[fork.parent], where[fork.call], fork))
    if hidden > 0:
        parts.append(text(4, frame.bottom + 16, f"and {hidden} shorter branches", class_="tick"))
    x_name = text(frame.right, frame.bottom + 16, "call, in order of the trace →", anchor="end", class_="axis-name")
    return Markup("").join([*parts, x_name]), frame.bottom + 52


def _lane_name(lane: Lane, base: float) -> Markup:
    prompt, resumed = sum(call.prompt_tokens for call in lane.calls), sum(call.resumed for call in lane.calls)
    indent = 4 + 12 * min(lane.depth, 4)
    first = lane.calls[0]
    origin = (
        f"left call {lane.parent + 1} with {first.resumed:,} of {first.prompt_tokens:,} tokens reused"
        if lane.parent is not None
        else "began afresh"
    )
    name = text(indent, base - 15, units.shorten(lane.name, 22 - 2 * min(lane.depth, 4)), hint=f"{lane.name}: {origin}")
    facts = f"{units.plural(len(lane.calls), 'call')}, {units.share(resumed / max(1, prompt))} reused"
    return name + text(indent, base - 1, facts, class_="tick", hint=origin)


def _call_bar(call: CallRecord, x: Scale, y: Scale, position: int) -> Markup:
    width = min(18.0, max(0.8, (x(1) - x(0)) * 0.8))
    values = [("reused", call.resumed), ("gap", call.gap), ("new", call.new_tokens)]
    limited = f", limited by {call.limited_by}" if call.limited_by not in ("none", "cold") else ""
    hint = (
        f"call {call.call + 1} on {call.branch}: {call.resumed:,} reused, {call.gap:,} gap, {call.new_tokens:,} new, "
        f"{call.generated:,} generated{limited}"
    )
    return stacked_bar(x(position) - width / 2, width, y, values, hint=hint)


def _curve(start: tuple[float, float], end: tuple[float, float], fork: CallRecord) -> Markup:
    """From the foot of the parent's bar to the foot of the fork's; within a lane, an arc below it."""
    (x1, y1), (x2, y2) = start, end
    bend = (
        f"C{x1:.1f} {y1 + 16:.1f} {x2:.1f} {y2 + 16:.1f}"
        if y1 == y2
        else f"C{x1:.1f} {(y1 + y2) / 2:.1f} {x1:.1f} {y2:.1f}"
    )
    hint = tooltip(
        f"{fork.branch} leaves call {(fork.parent or 0) + 1} at {fork.resumed:,} tokens; "
        f"{fork.gap:,} computed again, {fork.new_tokens:,} new"
    )
    shape = element("path", hint, d=f"M{x1:.1f} {y1:.1f}{bend} {x2:.1f} {y2:.1f}", class_="fork")
    return shape + element("circle", cx=x1, cy=y1, r=2.6, class_="fork-point")
