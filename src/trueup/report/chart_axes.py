"""Axes of charts: where numbers lie, which of them are written, and how."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trueup.report.figure_spec import Axis, Curve
from trueup.report.page_markup import signed

LETTER = 6.4  # width of a letter of a tick, in units of the drawing
LONGEST = 20  # letters of a tick
FEW = 6  # numbers, which are their own ticks if they are short
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """From numbers between `low` and `high` to places between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a number."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def shown(value: float) -> str:
    """A number as a reader wants it: four digits, thousands apart."""
    if abs(value) >= 1000 and math.isfinite(value):
        return signed(f"{value:,.0f}")
    return signed(f"{value:.4g}")


def plus_minus(value: float) -> str:
    """A deviation behind a number, if there is one."""
    return f" ± {value:.3g}" if math.isfinite(value) and value else ""


def short(word: str) -> str:
    """A word that leaves room for the chart; the whole one is among the values."""
    return word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…"


def span(curves: Iterable[Curve], *, zero: bool = False) -> tuple[float, float]:
    """The lowest and the highest number with its spread, and some air; bars stand on zero."""
    ends = [0.0] if zero else []
    for curve in curves:
        for value, spread in zip(curve.y, curve.spread or (0.0,) * len(curve.y), strict=True):
            margin = spread if math.isfinite(spread) else 0.0
            ends += [value - margin, value + margin] if math.isfinite(value) else []
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if zero and low == 0 else low - air), (high if zero and high == 0 and low < 0 else high + air)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between the two."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in STEPS if s * power >= rough * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def along(axis: Axis, values: Sequence[float], start: float, end: float) -> tuple[Scale, list[tuple[float, str]]]:
    """The scale below curves, and the places and words of its ticks."""
    if axis.ticks:
        scale = Scale(-0.5, len(axis.ticks) - 0.5, start, end)
        return scale, [(scale(i), short(word)) for i, word in enumerate(axis.ticks)]
    found = sorted({value for value in values if math.isfinite(value) and (value > 0 or not axis.log)})
    found = found or [1.0, 2.0]
    low, high = found[0], found[-1]
    if low == high:
        low, high = (low / 2, high * 2) if axis.log else (low - 0.5, high + 0.5)
    if axis.log:
        scale = Scale(low / 1.08, high * 1.08, start, end, log=True)
        every = math.ceil(len(found) / 8)
        return scale, [(scale(value), shown(value)) for value in found[::every]]
    air = (0.05 if len(found) <= FEW else 0.015) * (high - low)
    scale = Scale(low - air, high + air, start, end)
    own = len(found) <= FEW and all(len(shown(value)) <= 4 for value in found)
    chosen = found if own else ticks(low - air, high + air)
    return scale, [(scale(value), shown(value)) for value in chosen]


def crowded(words: Sequence[tuple[float, str]], room: float) -> bool:
    """Whether words at these places would touch, side by side."""
    widest = max((len(word) for _, word in words), default=0) * LETTER
    return len(words) > 1 and widest + 6 > room / len(words)
