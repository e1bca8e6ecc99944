"""Numbers as people read them: counts, tokens, bytes, seconds and shares."""

from __future__ import annotations

import math


def count(value: float) -> str:
    """12345 -> '12,345'; a fraction keeps what matters of it."""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


def compact(value: float) -> str:
    """1234567 -> '1.23M', for axes and headlines."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.99995:
            return f"{_three_digits(value / size)}{suffix}"
    return _three_digits(value)


def byte_size(value: float) -> str:
    """Decimal bytes: 1500000 -> '1.5 MB'."""
    for size, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= size * 0.99995:
            return f"{_three_digits(value / size)} {suffix}"
    return f"{_three_digits(value)} B"


def seconds(value: float) -> str:
    """0.0123 -> '12.3 ms'; 75 -> '75 s'; 600 -> '10 min'."""
    if value == 0:
        return "0 s"
    if abs(value) < 0.99995e-3:
        return f"{_three_digits(value * 1e6)} µs"
    if abs(value) < 0.99995:
        return f"{_three_digits(value * 1e3)} ms"
    return f"{_three_digits(value)} s" if abs(value) < 300 else f"{_three_digits(value / 60)} min"


def share(value: float) -> str:
    """0.9731 -> '97.3 %', 37.5 -> '37.5×'. Only exactly nothing and exactly all are written 0 % and 100 %."""
    percent = 100 * value
    if percent in (0.0, 100.0):
        return f"{percent:.0f} %"
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if percent < 100:
        return f"{min(percent, 99.9):.1f} %"
    return f"{percent:.0f} %" if percent < 1000 else factor(value)


def factor(value: float) -> str:
    """1.0342 -> '1.034×'; 37.21 -> '37.2×'."""
    return f"{value:.3f}×" if value < 9.9995 else f"{compact(value)}×"


def factor_tick(value: float) -> str:
    """1.0 -> '1×', for axes."""
    return f"{_three_digits(value)}×"


def plural(number: int, noun: str) -> str:
    """(1, 'call') -> '1 call'; (1200, 'call') -> '1,200 calls'."""
    if number == 1:
        return f"1 {noun}"
    return (
        f"{number:,} {noun[:-1]}ies" if noun.endswith("y") else f"{number:,} {noun}{'es' if noun[-2:] == 'ch' else 's'}"
    )


def shorten(text: str, limit: int) -> str:
    """Keeps both ends of a name that is too long."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
