"""SVG charts of curves: lines and bars, with their axes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.report.chart_marks import Drawing, bar_marks, coord, dashes, label_at, marker, polyline, series_group
from trueup.report.figure_spec import Axis, BarPanel, Curve, CurvePanel
from trueup.report.page_markup import minus_sign
from trueup.report.palette import Style

LETTER = 6.4  # width of a letter of a tick, in units of the drawing
LONGEST = 20  # letters of a tick
FEW = 6  # so many short numbers are their own ticks
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
TOP, RIGHT, BOTTOM, HIGH = 10, 12, 24, 250
MARKED = 12  # points; on longer curves, markers would hide the line
TURN = -35  # degrees that tick labels turn if they overlap
BAND = 0.8  # share of a group's width that its bars fill
Styles = Mapping[str, Style]


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


def shorten(word: str) -> str:
    """Cut a tick label to LONGEST letters; the full text is among the values read out."""
    return word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…"


def points_of(curve: Curve) -> Iterable[tuple[float, float, float]]:
    """Return x, y and spread of each point; the spread is 0 if there is none."""
    spreads = [spread if math.isfinite(spread) else 0.0 for spread in curve.spread] or [0.0] * len(curve.y)
    return zip(curve.x, curve.y, spreads, strict=True)


def value_range(curves: Iterable[Curve], *, zero: bool = False) -> tuple[float, float]:
    """Return the lowest and highest number with spread and margin; `zero` includes zero, for bars."""
    ends = [0.0] if zero else []
    for curve in curves:
        for _, value, spread in points_of(curve):
            ends += [value - spread, value + spread] if math.isfinite(value) else []
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


def draw_lines(panel: CurvePanel, styles: Styles, width: int) -> Drawing:
    """Draw curves, with bands for their spread."""
    y, x, height, frame = _frame(panel, width, zero=False)
    marks = [_curve(curve, x, y, list(styles).index(curve.label), styles[curve.label]) for curve in panel.curves]
    # All bands come first, so that none covers a line.
    svg = frame + "".join(band for band, _ in marks) + "".join(line for _, line in marks)
    return Drawing("along", width, height, svg, _values(panel, x, y, styles, heights=True))


def draw_bars(panel: BarPanel, styles: Styles, width: int) -> Drawing:
    """Draw bars in groups, with error bars."""
    y, x, height, frame = _frame(panel, width, zero=True)
    room = (x(1) - x(0)) * BAND if panel.x.ticks else BAND * (x.end - x.start)
    wide = min(room / max(len(panel.curves), 1), 34.0)
    parts = []
    for i, curve in enumerate(panel.curves):
        look = styles[curve.label]
        shift = (i - len(panel.curves) / 2) * wide
        parts.append(series_group(list(styles).index(curve.label), look, _bars(curve, look, x, y, shift, wide)))
    zero = f'<path class="axis" d="M{coord(x.start)} {coord(y(0))}H{coord(x.end)}"/>'
    values = _values(panel, x, y, styles, heights=False)
    return Drawing("along", width, height, frame + "".join(parts) + zero, values)


def _frame(panel: CurvePanel, width: int, *, zero: bool) -> tuple[Scale, Scale, float, str]:
    """Return the scales of y and x, the total height, and the grid with its numbers."""
    log = panel.y.log and not zero
    low, high = value_range(panel.curves, zero=zero)
    if log:
        positive = [v for curve in panel.curves for v in curve.y if v > 0] or [1.0]
        low, high = min(positive) / 1.2, max(positive) * 1.2
    y = Scale(low, high, TOP + HIGH, TOP, log=log)
    marks = _decades(low, high) if log else round_ticks(low, high)
    start = 12 + LETTER * max((len(format_number(mark)) for mark in marks), default=1)
    values = [value for curve in panel.curves for value in curve.x]
    x, ticks = horizontal_scale(panel.x, values, start, width - RIGHT)
    turned = labels_overlap(ticks, x.end - x.start)
    height = TOP + HIGH + (BOTTOM if not turned else 14 + 0.62 * LETTER * max(len(word) for _, word in ticks))
    grid = "".join(f'<path class="grid" d="M{coord(start)} {coord(y(mark))}H{coord(x.end)}"/>' for mark in marks)
    grid += "".join(label_at(start - 7, y(mark) + 4, format_number(mark), anchor="end") for mark in marks)
    for place, word in ticks:
        where = (place + 4, y.start + 14) if turned else (place, y.start + 18)
        grid += label_at(*where, word, anchor="end" if turned else "middle", turn=TURN if turned else 0)
    return y, x, height, grid + f'<path class="axis" d="M{coord(start)} {coord(y.start)}H{coord(x.end)}"/>'


def _decades(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    inside = [value for value in fine if low <= value <= high]
    return inside if len(inside) <= 7 else [value for value in inside if math.log10(value) % 1 == 0]


def _curve(curve: Curve, x: Scale, y: Scale, number: int, look: Style) -> tuple[str, str]:
    """Return the band and the line of a curve, broken where numbers are missing."""
    pieces: list[list[tuple[float, float, float]]] = [[]]
    for place, value, spread in points_of(curve):
        if not (math.isfinite(value) and math.isfinite(place)) or (y.log and value <= 0) or (x.log and place <= 0):
            pieces.append([])
        else:
            pieces[-1].append((place, value, spread))
    band = line = ""
    for piece in filter(None, pieces):
        points = [(x(place), y(value)) for place, value, _ in piece]
        line += polyline(points) if len(points) > 1 else ""
        if len(points) > 1 and any(spread for _, _, spread in piece):
            low = y.low if y.log else -math.inf
            edges = [(x(p), y(v + s)) for p, v, s in piece] + [(x(p), y(max(v - s, low))) for p, v, s in piece[::-1]]
            band += polyline(edges) + "Z"
    every = [point for piece in pieces for point in piece]
    marked = len(every) <= MARKED or not line
    dots = "".join(marker(look, x(place), y(value)) for place, value, _ in every) if marked else ""
    drawn = f'<path class="line" d="{line}"{dashes(look)}/>' if line else ""
    drawn += f'<path class="mark" d="{dots}"/>' if dots else ""
    shade = series_group(number, look, f'<path class="band" d="{band}"/>') if band else ""
    return shade, series_group(number, look, drawn)


def _bars(curve: Curve, look: Style, x: Scale, y: Scale, shift: float, wide: float) -> str:
    path = whiskers = ""
    for place, value, spread in points_of(curve):
        if not math.isfinite(value):
            continue
        left = x(place) + shift
        path += f"M{coord(left + 0.5)} {coord(y(0))}V{coord(y(value))}h{coord(wide - 1)}V{coord(y(0))}z"
        if spread:
            middle, reach = left + wide / 2, min(wide / 4, 4)
            low, high = coord(y(value - spread)), coord(y(value + spread))
            whiskers += f"M{coord(middle)} {low}V{high}M{coord(middle - reach)} {high}h{coord(2 * reach)}"
            whiskers += f"M{coord(middle - reach)} {low}h{coord(2 * reach)}"
    halo = "".join(f'<path class="{kind}" d="{whiskers}"/>' for kind in ("halo", "whisker") if whiskers)
    return f"{bar_marks(look, path)}{halo}"


def _values(panel: CurvePanel, x: Scale, y: Scale, styles: Styles, *, heights: bool) -> dict[str, Any]:
    """Return the stops along the axis for the script: coordinate, name, and each curve's number, text and height."""
    found: dict[float, list[Any]] = {}
    for curve in panel.curves:
        number = list(styles).index(curve.label)
        for place, value, spread in points_of(curve):
            if math.isfinite(value) and math.isfinite(place) and not (x.log and place <= 0):
                words = format_number(value) + (f" ± {spread:.3g}" if spread else "")
                drawn = heights and not (y.log and value <= 0)
                found.setdefault(place, []).append([number, words, float(coord(y(value))) if drawn else None])
    stops, ticks = [], panel.x.ticks
    for place in sorted(found):
        named = ticks and place == int(place) and 0 <= place < len(ticks)
        name = ticks[int(place)] if named else f"{panel.x.title}: {format_number(place)}"
        stops.append((float(coord(x(place))), 0.0, name, found[place]))
    return {"stops": stops, "top": TOP, "bottom": coord(y.start)}
