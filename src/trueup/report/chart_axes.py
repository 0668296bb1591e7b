"""Axes of SVG charts: scales, ticks and number formats."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trueup.report.figure_spec import Axis, Curve
from trueup.report.page_markup import minus_sign

LETTER = 6.4  # width of a letter of a tick, in units of the drawing
LONGEST = 20  # letters of a tick
FEW = 6  # so many short numbers are their own ticks
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """A map from numbers in [low, high] to coordinates in [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the coordinate of a number."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def format_number(value: float) -> str:
    """Return a number with four digits and a thousands separator."""
    if abs(value) >= 1000 and math.isfinite(value):
        return minus_sign(f"{value:,.0f}")
    return minus_sign(f"{value:.4g}")


def format_spread(value: float) -> str:
    """Return a deviation to append to a number; empty if there is none."""
    return f" ± {value:.3g}" if math.isfinite(value) and value else ""


def shorten(word: str) -> str:
    """Cut a tick label to LONGEST letters; the full text is among the values read out."""
    return word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…"


def points_of(curve: Curve) -> Iterable[tuple[float, float, float]]:
    """Return x, y and spread of each point; the spread is 0 if the curve has none."""
    return zip(curve.x, curve.y, curve.spread or (0.0,) * len(curve.y), strict=True)


def value_range(curves: Iterable[Curve], *, zero: bool = False) -> tuple[float, float]:
    """Return the lowest and highest number with spread and margin; `zero` includes zero, for bars."""
    ends = [0.0] if zero else []
    for curve in curves:
        for _, value, spread in points_of(curve):
            margin = spread if math.isfinite(spread) else 0.0
            ends += [value - margin, value + margin] if math.isfinite(value) else []
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if zero and low == 0 else low - air), (high if zero and high == 0 and low < 0 else high + air)


def round_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers in [low, high]."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in STEPS if s * power >= rough * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def horizontal_scale(
    axis: Axis, values: Sequence[float], start: float, end: float
) -> tuple[Scale, list[tuple[float, str]]]:
    """Return the scale of the x axis, and coordinate and label of each tick."""
    if axis.ticks:
        scale = Scale(-0.5, len(axis.ticks) - 0.5, start, end)
        return scale, [(scale(i), shorten(word)) for i, word in enumerate(axis.ticks)]
    found = sorted({value for value in values if math.isfinite(value) and (value > 0 or not axis.log)})
    found = found or [1.0, 2.0]
    low, high = found[0], found[-1]
    if low == high:
        low, high = (low / 2, high * 2) if axis.log else (low - 0.5, high + 0.5)
    if axis.log:
        scale = Scale(low / 1.08, high * 1.08, start, end, log=True)
        chosen = found[:: math.ceil(len(found) / 8)]
    else:
        air = (0.05 if len(found) <= FEW else 0.015) * (high - low)
        scale = Scale(low - air, high + air, start, end)
        own = len(found) <= FEW and all(len(format_number(value)) <= 4 for value in found)
        chosen = found if own else round_ticks(low - air, high + air)
    return scale, [(scale(value), format_number(value)) for value in chosen]


def labels_overlap(labels: Sequence[tuple[float, str]], room: float) -> bool:
    """Return True if tick labels do not fit side by side."""
    widest = max((len(word) for _, word in labels), default=0) * LETTER
    return len(labels) > 1 and widest + 6 > room / len(labels)
