"""Lines and bars over an axis, as SVG."""

import math
from collections.abc import Mapping
from typing import Any

from trueup.report.chart_axes import LETTER, Scale, along, crowded, plus_minus, shown, span, ticks
from trueup.report.chart_marks import Drawing, at, dashes, group, marker, polyline, solid, words
from trueup.report.figure_spec import Axis, Bars, Curve, Lines
from trueup.report.palette import Style

TOP, RIGHT, BOTTOM, HIGH = 10, 12, 24, 250
MARKED = 12  # points; on longer curves markers would hide the curve
TURN = -35  # degrees of words that do not fit side by side
BAND = 0.8  # of the room of a group that its bars take up
Styles = Mapping[str, Style]


def lines(panel: Lines, styles: Styles, width: int) -> Drawing:
    """Curves, with a band for their spread."""
    values = [value for curve in panel.curves for value in curve.x]
    y, x, height, frame = _frame(panel.x, panel.y, panel.curves, values, width, zero=False)
    marks = [_curve(curve, x, y, list(styles).index(curve.label), styles[curve.label]) for curve in panel.curves]
    # Without its bands first, the last curve's band would lie on the others.
    svg = frame + "".join(band for band, _ in marks) + "".join(line for _, line in marks)
    stops = _stops(panel.curves, panel.x, x, y, styles)
    return Drawing("along", width, height, svg, {"stops": stops, "top": TOP, "bottom": at(y.start)})


def bars(panel: Bars, styles: Styles, width: int) -> Drawing:
    """Bars in groups, with error bars."""
    values = [value for curve in panel.curves for value in curve.x]
    y, x, height, frame = _frame(panel.x, panel.y, panel.curves, values, width, zero=True)
    room = (x(1) - x(0)) * BAND if panel.x.ticks else BAND * (x.end - x.start)
    wide = min(room / max(len(panel.curves), 1), 34.0)
    parts = []
    for i, curve in enumerate(panel.curves):
        look = styles[curve.label]
        shift = (i - len(panel.curves) / 2) * wide
        parts.append(group(list(styles).index(curve.label), look, _bars(curve, look, x, y, shift, wide)))
    zero = f'<path class="axis" d="M{at(x.start)} {at(y(0))}H{at(x.end)}"/>'
    stops = _stops(panel.curves, panel.x, x, None, styles)
    return Drawing(
        "along", width, height, frame + "".join(parts) + zero, {"stops": stops, "top": TOP, "bottom": at(y.start)}
    )


def _frame(
    below: Axis, left: Axis, curves: tuple[Curve, ...], values: list[float], width: int, *, zero: bool
) -> tuple[Scale, Scale, float, str]:
    """Both scales, the height of it all, and the grid with its numbers."""
    low, high = span(curves, zero=zero)
    if left.log and not zero:
        positive = [v for curve in curves for v in curve.y if v > 0] or [1.0]
        low, high = min(positive) / 1.2, max(positive) * 1.2
    y = Scale(low, high, TOP + HIGH, TOP, log=left.log and not zero)
    marks = _decades(low, high) if y.log else ticks(low, high)
    start = 12 + LETTER * max((len(shown(mark)) for mark in marks), default=1)
    x, named = along(below, values, start, width - RIGHT)
    turned = crowded(named, x.end - x.start)
    height = TOP + HIGH + (BOTTOM if not turned else 14 + 0.62 * LETTER * max(len(word) for _, word in named))
    grid = "".join(f'<path class="grid" d="M{at(start)} {at(y(mark))}H{at(x.end)}"/>' for mark in marks)
    grid += "".join(words(start - 7, y(mark) + 4, shown(mark), anchor="end") for mark in marks)
    for place, word in named:
        where = (place + 4, y.start + 14) if turned else (place, y.start + 18)
        grid += words(*where, word, anchor="end" if turned else "middle", turn=TURN if turned else 0)
    return y, x, height, grid + f'<path class="axis" d="M{at(start)} {at(y.start)}H{at(x.end)}"/>'


def _decades(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    inside = [value for value in fine if low <= value <= high]
    return inside if len(inside) <= 7 else [value for value in inside if math.log10(value) % 1 == 0]


def _curve(curve: Curve, x: Scale, y: Scale, number: int, look: Style) -> tuple[str, str]:
    """A curve's band and its line, in pieces where numbers are missing."""
    pieces: list[list[tuple[float, float, float]]] = [[]]
    for place, value, spread in zip(curve.x, curve.y, curve.spread or (0.0,) * len(curve.y), strict=True):
        if not (math.isfinite(value) and math.isfinite(place)) or (y.log and value <= 0) or (x.log and place <= 0):
            pieces.append([])
        else:
            pieces[-1].append((place, value, spread if math.isfinite(spread) else 0.0))
    band = line = ""
    for piece in filter(None, pieces):
        points = [(x(place), y(value)) for place, value, _ in piece]
        line += polyline(points) if len(points) > 1 else ""
        if len(points) > 1 and any(spread for _, _, spread in piece):
            low = y.low if y.log else -math.inf
            edges = [(x(p), y(v + s)) for p, v, s in piece] + [(x(p), y(max(v - s, low))) for p, v, s in piece[::-1]]
            band += polyline(edges) + "Z"
    whole = [point for piece in pieces for point in piece]
    marked = len(whole) <= MARKED or not line
    dots = "".join(marker(look, x(place), y(value)) for place, value, _ in whole) if marked else ""
    drawn = f'<path class="line" d="{line}"{dashes(look)}/>' if line else ""
    drawn += f'<path class="mark" d="{dots}"/>' if dots else ""
    return (group(number, look, f'<path class="band" d="{band}"/>') if band else ""), group(number, look, drawn)


def _bars(curve: Curve, look: Style, x: Scale, y: Scale, shift: float, wide: float) -> str:
    path = whiskers = ""
    for place, value, spread in zip(curve.x, curve.y, curve.spread or (0.0,) * len(curve.y), strict=True):
        if not math.isfinite(value):
            continue
        left = x(place) + shift
        path += f"M{at(left + 0.5)} {at(y(0))}V{at(y(value))}h{at(wide - 1)}V{at(y(0))}z"
        if math.isfinite(spread) and spread:
            middle, reach = left + wide / 2, min(wide / 4, 4)
            low, high = at(y(value - spread)), at(y(value + spread))
            whiskers += f"M{at(middle)} {low}V{high}M{at(middle - reach)} {high}h{at(2 * reach)}"
            whiskers += f"M{at(middle - reach)} {low}h{at(2 * reach)}"
    halo = "".join(f'<path class="{kind}" d="{whiskers}"/>' for kind in ("halo", "whisker") if whiskers)
    return f"{solid(look, path)}{halo}"


def _stops(
    curves: tuple[Curve, ...], axis: Axis, x: Scale, y: Scale | None, styles: Styles
) -> list[tuple[float, float, str, list[Any]]]:
    """For each place along the axis: where it is, its name, and of every curve the number, its text and its height."""
    found: dict[float, list[Any]] = {}
    for curve in curves:
        number = list(styles).index(curve.label)
        for place, value, spread in zip(curve.x, curve.y, curve.spread or (0.0,) * len(curve.y), strict=True):
            if math.isfinite(value) and math.isfinite(place) and not (x.log and place <= 0):
                said = shown(value) + plus_minus(spread)
                drawn = y is not None and not (y.log and value <= 0)
                found.setdefault(place, []).append([number, said, float(at(y(value))) if y and drawn else None])
    stops = []
    for place in sorted(found):
        whole = axis.ticks and place == int(place) and 0 <= place < len(axis.ticks)
        name = axis.ticks[int(place)] if whole else f"{axis.title}: {shown(place)}"
        stops.append((float(at(x(place))), 0.0, name, found[place]))
    return stops
