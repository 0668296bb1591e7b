"""Marks of SVG charts: markers, lines, bars, text and legend samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trueup.report.page_markup import escape
from trueup.report.palette import INK, Style

# Closed paths around (0, 0), about 8 units wide.
SHAPES = {
    "o": "m-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0z",
    "s": "m-3.1-3.1h6.2v6.2h-6.2z",
    "^": "m0-4.2l3.9 7h-7.8z",
    "v": "m0 4.2l3.9-7h-7.8z",
    "<": "m-4.2 0l7-3.9v7.8z",
    ">": "m4.2 0l-7-3.9v7.8z",
    "D": "m0-4.3l4.3 4.3l-4.3 4.3l-4.3-4.3z",
    "P": "m-1.4-4h2.8v2.6h2.6v2.8h-2.6v2.6h-2.8v-2.6h-2.6v-2.8h2.6z",
    "X": "m0-2l2-2l2 2l-2 2l2 2l-2 2l-2-2l-2 2l-2-2l2-2l-2-2l2-2z",
    "*": "m0-4.8l1.3 3.2l3.5.2l-2.7 2.2l.9 3.4l-3-1.9l-3 1.9l.9-3.4l-2.7-2.2l3.5-.2z",
}

# Hatching of bars, by the marker of the style, in a tile of 6 units.
HATCHES = {
    "s": "M-1 1l2-2M0 6l6-6M5 7l2-2",
    "^": "M1 1.5h1.4M4 4.5h1.4",
    "D": "M-1 5l2 2M0 0l6 6M5-1l2 2",
    "v": "M0 0l6 6M0 6l6-6",
    "P": "M0 3h6",
    "X": "M0 3h6M3 0v6",
    "<": "M3 0v6",
    ">": "M1 3a2 2 0 1 0 4 0a2 2 0 1 0-4 0",
}


@dataclass(frozen=True)
class Drawing:
    """A chart: its size, its marks, and the values that the script reads out at its stops."""

    kind: str
    width: float
    height: float
    svg: str
    values: dict[str, Any]


def coord(number: float) -> str:
    """Return a coordinate, rounded to a tenth of a unit."""
    return f"{number:.1f}".removesuffix(".0")


def marker(look: Style, x: float, y: float) -> str:
    """Return the path of a marker at (x, y)."""
    return f"M{coord(x)} {coord(y)}{SHAPES.get(look.marker, SHAPES['o'])}"


def series_group(number: int, look: Style, inside: str) -> str:
    """Return all marks of a curve, to be hidden together. Black becomes the theme's ink."""
    colour = "var(--ink)" if look.colour == INK else look.colour
    return f'<g class="series" data-series="{number}" style="--c:{escape(colour)}">{inside}</g>'


def dashes(look: Style, width: float = 2) -> str:
    """Return the attribute that makes a line dashed; empty if it is solid."""
    pattern = " ".join(coord(length * width) for length in look.dash)
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def label_at(x: float, y: float, words: str, *, anchor: str = "middle", turn: int = 0) -> str:
    """Return a line of text, rotated by `turn` degrees."""
    turned = f' transform="rotate({turn} {coord(x)} {coord(y)})"' if turn else ""
    return f'<text x="{coord(x)}" y="{coord(y)}" text-anchor="{anchor}"{turned}>{escape(words)}</text>'


def legend_sample(look: Style, kind: str) -> str:
    """Return a sample of a style for the legend."""
    line = f'<path class="line" d="M1 7H27"{dashes(look)}/><path class="mark" d="{marker(look, 14, 7)}"/>'
    inside = {
        "line": line,
        "outline": '<path class="outline" d="M1 7H27"/>',
        "bar": bar_marks(look, "M5 1h18v12h-18z"),
        "dot": f'<path class="mark" d="{marker(look, 14, 7)}"/>',
    }[kind]
    return f'<svg class="sample" viewBox="0 0 28 14" aria-hidden="true">{series_group(0, look, inside)}</svg>'


def hatch_patterns() -> str:
    """Return the patterns for all bars of a page. They must not be hidden: browsers do not paint hidden patterns."""
    tile = 'width="6" height="6" patternUnits="userSpaceOnUse"'
    made = [f'<pattern id="hatch-{i}" {tile}><path d="{path}"/></pattern>' for i, path in enumerate(HATCHES.values())]
    return f'<svg class="hatches" width="0" height="0" aria-hidden="true"><defs>{"".join(made)}</defs></svg>'


def bar_marks(look: Style, path: str) -> str:
    """Return bars, hatched so that they differ in grey and when colours repeat."""
    over = f'<path fill="url(#hatch-{list(HATCHES).index(look.marker)})" d="{path}"/>' if look.marker in HATCHES else ""
    return f'<path class="mark" d="{path}"/>{over}'


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """Return the path through points."""
    return "M" + "L".join(f"{coord(x)} {coord(y)}" for x, y in points)
