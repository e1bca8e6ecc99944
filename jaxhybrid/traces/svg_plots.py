"""Plots of tokens, policies and latency. Each returns a `Figure`: a finding as its title, and an SVG that shows it."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from jaxhybrid.traces import units
from jaxhybrid.traces.record import CallRecord, ColdSample
from jaxhybrid.traces.simulate import PolicyResult
from jaxhybrid.traces.summary import Totals, by_trajectory, plain_name, total
from jaxhybrid.traces.svg_canvas import Panel, Scale, drawing, element, line, path, stacked_bar, text, tooltip

TOKEN_KINDS = (("reused", "reused"), ("gap", "computed again (gap)"), ("new", "new prompt"), ("generated", "generated"))
MAX_BARS = 120
MAX_POINTS = 1200
SMALL_MULTIPLES = 8


@dataclass(frozen=True)
class Figure:
    """A plot for the page. `legend` pairs CSS classes with meanings; without data `svg` is None, `note` says why."""

    key: str
    title: str
    note: str
    legend: tuple[tuple[str, str], ...] = ()
    svg: Markup | None = None


@dataclass(frozen=True)
class Bin:
    """Calls drawn as one bar: `first` to `last` (from 1), and how many calls that is."""

    first: int
    last: int
    calls: int
    tokens: tuple[tuple[str, int], ...]

    @property
    def computed(self) -> tuple[tuple[str, int], ...]:
        return self.tokens[1:]

    @property
    def height(self) -> int:
        return sum(value for _, value in self.tokens)

    @property
    def span(self) -> str:
        return f"call {self.first}" if self.first == self.last else f"calls {self.first} to {self.last}"

    @property
    def hint(self) -> str:
        parts = ", ".join(f"{value:,} {name}" for name, value in self.tokens)
        return f"{self.span} ({units.plural(self.calls, 'call')}): {parts}"


def tokens_by_call(calls: Sequence[CallRecord], totals: Totals) -> Figure:
    """Stacked bars by call number over all trajectories: everything, and below it only what was computed."""
    if not calls:
        return Figure("tokens", "Where the tokens went", "No call was replayed.")
    longest = max(call.call for call in calls) + 1
    by_arrival = longest < 4 and len(calls) > 4 * longest
    order = list(range(len(calls))) if by_arrival else [call.call for call in calls]
    bins = _bins(calls, order, MAX_BARS)
    everything, computed = Panel(64, 30, 950, 230), Panel(64, 290, 950, 400)
    name = "call, in order of replay" if by_arrival else "call within its trajectory"
    svg = drawing(
        440,
        "Tokens by call, stacked",
        _bars(everything, bins, [each.tokens for each in bins], "all", "tokens, all kinds"),
        _bars(computed, bins, [each.computed for each in bins], "computed", "tokens, computed only", x_name=name),
    )
    title = (
        f"{units.share(totals.hit_rate)} of {units.compact(totals.prompt)} prompt tokens were reused; "
        f"{units.count(totals.gap)} known tokens were computed again"
    )
    note = f"Summed over {units.plural(len({call.trajectory for call in calls}), 'trajectory')}" + (
        "; bars fall off where trajectories end." if not by_arrival else "."
    )
    return Figure("tokens", title, note, TOKEN_KINDS, svg)


def tokens_by_trajectory(calls: Sequence[CallRecord]) -> Figure:
    """The same bars for the largest trajectories, one small panel each, on one vertical scale."""
    groups = by_trajectory(calls)
    if not groups:
        return Figure("trajectories", "Trajectory by trajectory", "No call was replayed.")
    largest = sorted(groups.items(), key=lambda item: -sum(call.prompt_tokens for call in item[1]))[:SMALL_MULTIPLES]
    rows = [(total(name, group), _bins(group, list(range(len(group))), 48)) for name, group in largest]
    highest = max(each.height / (each.last - each.first + 1) for _, bins in rows for each in bins)
    columns, tall = 4, 168
    parts: list[Markup] = []
    for index, (totals, bins) in enumerate(rows):
        left, top = 46 + (index % columns) * 232, 46 + (index // columns) * tall
        panel = Panel(left, top, left + 190, top + 84)
        title = text(left, top - 24, units.shorten(totals.name, 27), class_="panel-title", hint=totals.name)
        facts = f"{units.share(totals.hit_rate)} reused, gap {units.count(totals.gap)}"
        parts.append(title + text(left, top - 9, facts, class_="tick") + _small_bars(panel, bins, highest))
    height = 46 + math.ceil(len(rows) / columns) * tall - 34
    best, worst = (
        pick(totals for totals, _ in rows) for pick in (lambda r: max(r, key=_rate), lambda r: min(r, key=_rate))
    )
    finding = (
        f"From {units.share(worst.hit_rate)} to {units.share(best.hit_rate)} reused among the largest trajectories"
        if len(rows) > 1
        else f"{units.share(best.hit_rate)} reused in the one trajectory"
    )
    note = f"The {len(rows)} with most prompt tokens of {len(groups)}, bars show tokens a call, on one scale."
    return Figure("trajectories", finding, note, TOKEN_KINDS, drawing(height, "Tokens by trajectory", *parts))


def policies(results: Sequence[PolicyResult]) -> Figure:
    """Gap and prefill amplification by checkpoint policy, on logarithmic scales, beside a perfect token-level cache."""
    if not results:
        return Figure("policies", "What each checkpoint policy costs", "The policy study did not run.")
    perfect = next((each for each in results if plain_name(each.policy).startswith("perfect")), None)
    top, row = 56, 30
    bottom = top + row * len(results)
    gaps, factors = Panel(196, top, 500, bottom), Panel(606, top, 816, bottom)
    gap_high = max(each.gap_tokens for each in results)
    gap_scale = gaps.x(1, max(10, gap_high), logarithmic=True)
    low = min(1.0, *(each.amplification for each in results)) if len(results) > 1 else 1.0
    factor_scale = factors.x(max(low, 1e-3), max(2.0, *(each.amplification for each in results), 0), logarithmic=True)
    parts = [
        text(gaps.left, 26, "Recomputation gap (tokens, log)", class_="panel-title"),
        text(factors.left, 26, "Prefill amplification (×, log)", class_="panel-title"),
        gaps.x_axis(gap_scale, units.compact, wanted=4, grid=True),
        factors.x_axis(factor_scale, units.factor_tick, wanted=4, grid=True),
    ]
    if perfect:
        at = factor_scale(perfect.amplification)
        parts.append(line(at, top - 12, at, bottom, "reference"))
        parts.append(text(at + 4, top - 8, f"perfect cache {units.factor(perfect.amplification)}", class_="tick"))
    for index, result in enumerate(results):
        y = top + row * (index + 0.5)
        parts.append(text(gaps.left - 14, y + 4, result.policy, anchor="end", class_="row-name"))
        hint = (
            f"{result.policy}: {result.computed_tokens:,} tokens computed for {result.growth_tokens:,} of growth, "
            f"gap {result.gap_tokens:,}, {units.share(result.hit_rate)} hit rate"
        )
        parts.append(_lollipop(gap_scale, y, result.gap_tokens, units.compact(result.gap_tokens), "gap", hint))
        label = f"{units.factor(result.amplification)}  ({_extra(result)})"
        parts.append(_lollipop(factor_scale, y, result.amplification, label, "new", hint))
    note = (
        "Same traces, token ids alone. Amplification: tokens computed over growth of the context; "
        "in brackets, prefill beyond a perfect token-level cache."
    )
    return Figure("policies", _policy_finding(results), note, (), drawing(bottom + 30, "Policies", *parts))


def response_end(pair: tuple[PolicyResult, PolicyResult]) -> Figure:
    """The gap call by call without and with response-end checkpoints, one above the other on one scale."""
    panels = (Panel(64, 34, 950, 134), Panel(64, 184, 950, 284))
    length = max(len(each.gap_by_call) for each in pair)
    size = math.ceil(max(1, length) / MAX_BARS)
    rows = [[sum(each.gap_by_call[start : start + size]) for start in range(0, max(1, length), size)] for each in pair]
    highest = max(1, *rows[0], *rows[1]) * 1.04
    parts: list[Markup] = []
    for panel, class_, values in zip(panels, ("without", "with"), rows, strict=True):
        x, y = panel.x(0.5, len(values) * size + 0.5), panel.y(0, highest)
        last = "call" if class_ == "with" else ""
        parts += [panel.y_axis(y, units.compact, f"gap (tokens), {class_}", wanted=2), panel.x_axis(x, whole, last)]
        for index, value in enumerate(values):
            bin_ = Bin(index * size + 1, (index + 1) * size, pair[0].calls, ((class_, value),))
            parts.append(_bar(x, y, bin_, bin_.tokens, hint=f"{bin_.span}: gap {value:,}", series=class_))
    title = (
        f"Without response-end checkpoints a call recomputes {units.count(_gap_per_call(pair[0]))} tokens on average, "
        f"with them {units.count(_gap_per_call(pair[1]))}"
    )
    note = f"“{pair[0].policy}” above, “{pair[1].policy}” below: the same traces, summed by call."
    legend = (("without", "without response-end checkpoints"), ("with", "with"))
    return Figure("response-end", title, note, legend, drawing(324, "Gap by call", *parts))


def latency(calls: Sequence[CallRecord], cold: Sequence[ColdSample]) -> Figure:
    """Time to first token against context length: every call, and the prompts that were also run cold."""
    cold = [sample for sample in cold if sample.cold_ttft_s > 0 and sample.warm_ttft_s > 0]
    warm_points = [(call.prompt_tokens, call.ttft_s) for call in calls if call.resumed and call.ttft_s > 0]
    warm_points += [(sample.context_tokens, sample.warm_ttft_s) for sample in cold]
    cold_points = [(call.prompt_tokens, call.ttft_s) for call in calls if not call.resumed and call.ttft_s > 0]
    cold_points += [(sample.context_tokens, sample.cold_ttft_s) for sample in cold]
    if not warm_points and not cold_points:
        return Figure("latency", "Time to first token", "No call was timed.")
    times = [seconds for _, seconds in warm_points + cold_points]
    panel = Panel(72, 34, 950, 320)
    x = panel.x(0, max(tokens for tokens, _ in warm_points + cold_points) * 1.02)
    y = panel.y(min(times) / 1.4, max(times) * 1.4, logarithmic=True)
    svg = drawing(
        365,
        "Time to first token against context length",
        panel.y_axis(y, units.seconds, "time to first token (log)"),
        panel.x_axis(x, units.compact, "prompt (tokens)"),
        *_points(warm_points, x, y, "warm"),
        *_points(cold_points, x, y, "cold"),
        _median_line(warm_points, x, y, "warm"),
        _median_line(cold_points, x, y, "cold"),
    )
    legend = (("warm", "resumed from a bundle"), ("cold", "prefilled from nothing"))
    note = "One mark a call; lines are medians over equal spans of context."
    if cold:
        note += f" {units.plural(len(cold), 'prompt')} ran both ways."
    if len(warm_points) > MAX_POINTS or len(cold_points) > MAX_POINTS:
        note += f" Thinned to at most {MAX_POINTS:,} marks a kind; medians use all."
    return Figure("latency", _latency_finding(warm_points, cold_points, cold), note, legend, svg)


def _bins(calls: Sequence[CallRecord], order: Sequence[int], limit: int) -> list[Bin]:
    """Groups calls by position; neighbours share a bin where there are more positions than `limit`."""
    size = math.ceil((max(order) + 1) / limit)
    groups: dict[int, list[CallRecord]] = defaultdict(list)
    for position, call in zip(order, calls, strict=True):
        groups[position // size].append(call)
    last = max(order) + 1
    return [
        Bin(
            first=index * size + 1,
            last=min((index + 1) * size, last),
            calls=len(group),
            tokens=(
                ("reused", sum(call.resumed for call in group)),
                ("gap", sum(call.gap for call in group)),
                ("new", sum(call.new_tokens for call in group)),
                ("generated", sum(call.generated for call in group)),
            ),
        )
        for index, group in sorted(groups.items())
    ]


def _bars(
    panel: Panel,
    bins: Sequence[Bin],
    values: Sequence[Sequence[tuple[str, int]]],
    series: str,
    name: str,
    x_name: str = "",
) -> Markup:
    heights = [sum(value for _, value in each) for each in values]
    y = panel.y(0, max(1, *heights) * 1.04)
    x = panel.x(bins[0].first - 0.5, bins[-1].last + 0.5)
    bars = [_bar(x, y, each, value, hint=each.hint, series=series) for each, value in zip(bins, values, strict=True)]
    axes = panel.y_axis(y, units.compact, name) + panel.x_axis(x, whole, x_name, wanted=12)
    return element("g", axes, *bars, class_="series", data_scale=repr((panel.bottom - panel.top) / y.high))


def _bar(x: Scale, y: Scale, each: Bin, values: Sequence[tuple[str, float]], *, hint: str, series: str = "") -> Markup:
    left, right = x(each.first - 0.5), x(each.last + 0.5)
    width = min(48.0, (right - left) * 0.86)
    return stacked_bar((left + right - width) / 2, width, y, values, hint=hint, series=series)


def _small_bars(panel: Panel, bins: Sequence[Bin], highest: float) -> Markup:
    y = panel.y(0, highest)
    x = panel.x(bins[0].first - 0.5, bins[-1].last + 0.5)
    bars = []
    for each in bins:
        size = each.last - each.first + 1
        bars.append(_bar(x, y, each, [(name, value / size) for name, value in each.tokens], hint=each.hint))
    return panel.y_axis(y, units.compact, wanted=2) + panel.x_axis(x, whole, wanted=4) + Markup("").join(bars)


def _lollipop(scale: Scale, y: float, value: float, label: str, class_: str, hint: str) -> Markup:
    """A dot on a line from the left edge; a value of zero sits on the edge."""
    at = scale(value)
    return element(
        "g",
        tooltip(hint),
        line(scale.start, y, at, y, f"stem stroke-{class_}"),
        element("circle", cx=at, cy=y, r=5.5, class_=f"fill-{class_}", data_value=value),
        text(at + 11, y + 4, label, class_="value"),
    )


def _points(points: Sequence[tuple[int, float]], x: Scale, y: Scale, class_: str) -> list[Markup]:
    """Circles for warm, diamonds for cold, thinned evenly."""
    step = max(1, math.ceil(len(points) / MAX_POINTS))
    marks = []
    for tokens, seconds in sorted(points)[::step]:
        left, top = x(tokens), y(seconds)
        hint = tooltip(f"{class_}: {tokens:,} tokens, first token after {units.seconds(seconds)}")
        if class_ == "warm":
            marks.append(element("circle", hint, cx=left, cy=top, r=3.4, class_="mark fill-warm"))
        else:
            diamond = f"M{left:.1f} {top - 5:.1f}l5 5l-5 5l-5 -5Z"
            marks.append(element("path", hint, d=diamond, class_="mark fill-cold"))
    return marks


def _median_line(points: Sequence[tuple[int, float]], x: Scale, y: Scale, class_: str) -> Markup:
    groups: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for point in points:
        groups[int(12 * point[0] / x.high)].append(point)
    middle = [
        (x(statistics.median(tokens for tokens, _ in group)), y(statistics.median(seconds for _, seconds in group)))
        for _, group in sorted(groups.items())
    ]
    return path(middle, f"trend stroke-{class_}") if len(middle) > 1 else Markup("")


def _latency_finding(
    warm: Sequence[tuple[int, float]], cold: Sequence[tuple[int, float]], samples: Sequence[ColdSample]
) -> str:
    if samples:
        longest = max(samples, key=lambda sample: sample.context_tokens)
        ratio = longest.cold_ttft_s / longest.warm_ttft_s
        return (
            f"At {units.compact(longest.context_tokens)} tokens the first token comes after "
            f"{units.seconds(longest.warm_ttft_s)} with reuse and {units.seconds(longest.cold_ttft_s)} without"
        ) + (f": {ratio:.0f}× sooner" if ratio >= 2 else "")
    parts = [
        f"{name} {units.seconds(statistics.median(seconds for _, seconds in points))}"
        for name, points in (("resumed", warm), ("from nothing", cold))
        if points
    ]
    return f"Median time to first token: {', '.join(parts)}"


def _policy_finding(results: Sequence[PolicyResult]) -> str:
    real = [each for each in results if not plain_name(each.policy).startswith("perfect")]
    if not real:
        return "What each checkpoint policy costs"
    best, worst = min(real, key=lambda each: each.computed_tokens), max(real, key=lambda each: each.computed_tokens)
    return (
        f"“{best.policy}” computes {units.factor(best.amplification)} the growth of the context, "
        f"“{worst.policy}” {units.factor(worst.amplification)}"
    )


def _gap_per_call(result: PolicyResult) -> float:
    return result.gap_tokens / max(1, result.calls)


def _extra(result: PolicyResult) -> str:
    return f"+{units.share(result.extra_prefill)}"


def _rate(totals: Totals) -> float:
    return totals.hit_rate


def whole(value: float) -> str:
    """Whole numbers only: an axis of counts has no halves."""
    return f"{value:,.0f}" if float(value).is_integer() else ""
