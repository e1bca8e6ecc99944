"""The few pieces that plots are drawn from: escaped SVG elements, scales, ticks and axes. Colours are CSS classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 960.0


def element(tag: str, *children: str | Markup, **attributes: object) -> Markup:
    """One element, its attributes escaped; `class_` and `stroke_width` become `class` and `stroke-width`."""
    pairs = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    body = Markup("").join(children)
    return Markup(f"<{tag}{pairs}>{body}</{tag}>") if body else Markup(f"<{tag}{pairs}/>")


def drawing(height: float, label: str, *children: str | Markup, width: float = WIDTH) -> Markup:
    """The whole picture, named for screen readers."""
    return element(
        "svg",
        *children,
        class_="drawing",
        viewBox=f"0 0 {_plain(width)} {_plain(height)}",
        role="img",
        aria_label=label,
    )


def text(x: float, y: float, content: str, *, anchor: str = "start", class_: str = "label", hint: str = "") -> Markup:
    """Text at its baseline; `hint` shows on hover."""
    children = (escape(content), tooltip(hint)) if hint else (escape(content),)
    return element("text", *children, x=x, y=y, text_anchor=anchor, class_=class_)


def tooltip(content: str) -> Markup:
    return element("title", escape(content))


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def path(points: Iterable[tuple[float, float]], class_: str, *, closed: bool = False) -> Markup:
    steps = "L".join(f"{_plain(x)} {_plain(y)}" for x, y in points)
    return element("path", d=f"M{steps}{'Z' if closed else ''}", class_=class_)


@dataclass(frozen=True)
class Scale:
    """Maps `low..high` of the data to `start..end` on the canvas, evenly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (self.end - self.start) * (at - low) / ((high - low) or 1.0)

    def ticks(self, wanted: int = 5) -> list[float]:
        """About `wanted` round values within the range; on a logarithmic scale powers of ten first."""
        return _log_ticks(self.low, self.high, wanted) if self.logarithmic else _even_ticks(self.low, self.high, wanted)


@dataclass(frozen=True)
class Panel:
    """A plotting area: left, top, right and bottom edge on the canvas."""

    left: float
    top: float
    right: float
    bottom: float

    def x(self, low: float, high: float, *, logarithmic: bool = False) -> Scale:
        return Scale(low, high, self.left, self.right, logarithmic)

    def y(self, low: float, high: float, *, logarithmic: bool = False) -> Scale:
        return Scale(low, high, self.bottom, self.top, logarithmic)

    def y_axis(self, scale: Scale, show: Callable[[float], str], name: str = "", *, wanted: int = 4) -> Markup:
        """Horizontal grid lines with their values, and the axis name above them."""
        parts = [text(self.left - 8, self.top - 10, name, anchor="start", class_="axis-name")] if name else []
        for value in scale.ticks(wanted):
            at = scale(value)
            parts.append(line(self.left, at, self.right, at, "grid"))
            parts.append(text(self.left - 8, at + 4, show(value), anchor="end", class_="tick"))
        return Markup("").join(parts)

    def x_axis(
        self, scale: Scale, show: Callable[[float], str], name: str = "", *, wanted: int = 8, grid: bool = False
    ) -> Markup:
        """The base line, its values, and the axis name under them at the right."""
        parts = [line(self.left, self.bottom, self.right, self.bottom, "base")]
        for value in scale.ticks(wanted):
            at = scale(value)
            if grid:
                parts.append(line(at, self.top, at, self.bottom, "grid"))
            parts.append(text(at, self.bottom + 17, show(value), anchor="middle", class_="tick"))
        if name:
            parts.append(text(self.right, self.bottom + 35, name, anchor="end", class_="axis-name"))
        return Markup("").join(parts)


def stacked_bar(
    x: float, width: float, scale: Scale, values: Sequence[tuple[str, float]], *, hint: str, series: str = ""
) -> Markup:
    """One bar of (class, value) segments from the base up; each segment carries its value as `data-value`."""
    parts: list[Markup] = [tooltip(hint)]
    base = 0.0
    for class_, value in values:
        if value <= 0:
            continue
        top, bottom = scale(base + value), scale(base)
        parts.append(
            element("rect", x=x, y=top, width=width, height=bottom - top, class_=f"fill-{class_}", data_value=value)
        )
        base += value
    return element("g", *parts, class_=f"bar {series}".strip())


def _plain(value: object) -> str:
    if isinstance(value, float):
        rounded = f"{value:.2f}".rstrip("0").rstrip(".")
        return "0" if rounded == "-0" else rounded
    return str(value)


def _even_ticks(low: float, high: float, wanted: int) -> list[float]:
    if high <= low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, wanted: int) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in ((1,), (1, 3), (1, 2, 5)):
        ticks = [float(f"{each}e{power}") for power in powers for each in multiples]
        inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(inside) >= wanted - 1:
            break
    return inside[:: max(1, math.ceil(len(inside) / (2 * wanted)))]
