"""The marks of charts: dots, strokes and samples of them, as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trueup.report.page_markup import text
from trueup.report.palette import INK, Style

# Each around (0, 0), about 8 units wide; strokes are closed, so they can be filled.
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

# Lines of paper on a bar, by the marker that its curve would have, in a tile of 6 units.
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
    """A chart: its size, its marks, and the values that are read out at its stops."""

    kind: str
    width: float
    height: float
    svg: str
    values: dict[str, Any]


def at(number: float) -> str:
    """A place in a drawing, to a tenth of a unit."""
    return f"{number:.1f}".removesuffix(".0")


def marker(look: Style, x: float, y: float) -> str:
    """The path of a marker at a place."""
    return f"M{at(x)} {at(y)}{SHAPES.get(look.marker, SHAPES['o'])}"


def group(number: int, look: Style, inside: str) -> str:
    """All marks of a curve, so that it can be hidden at once. Black means ink, which is white at night."""
    colour = "var(--ink)" if look.colour == INK else look.colour
    return f'<g class="series" data-series="{number}" style="--c:{text(colour)}">{inside}</g>'


def dashes(look: Style, width: float = 2) -> str:
    """The attribute that makes a line dashed."""
    pattern = " ".join(at(length * width) for length in look.dash)
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def words(x: float, y: float, said: str, *, anchor: str = "middle", turn: int = 0) -> str:
    """A line of text; turned, it ends at its place."""
    turned = f' transform="rotate({turn} {at(x)} {at(y)})"' if turn else ""
    return f'<text x="{at(x)}" y="{at(y)}" text-anchor="{anchor}"{turned}>{text(said)}</text>'


def key(look: Style, kind: str) -> str:
    """A sample for the legend."""
    line = f'<path class="line" d="M1 7H27"{dashes(look)}/><path class="mark" d="{marker(look, 14, 7)}"/>'
    inside = {
        "line": line,
        "outline": '<path class="outline" d="M1 7H27"/>',
        "bar": solid(look, "M5 1h18v12h-18z"),
        "dot": f'<path class="mark" d="{marker(look, 14, 7)}"/>',
    }[kind]
    return f'<svg class="sample" viewBox="0 0 28 14" aria-hidden="true">{group(0, look, inside)}</svg>'


def hatches() -> str:
    """The patterns, once for all bars of a page. Not hidden: a hidden pattern would paint nothing."""
    tile = 'width="6" height="6" patternUnits="userSpaceOnUse"'
    made = [f'<pattern id="hatch-{i}" {tile}><path d="{path}"/></pattern>' for i, path in enumerate(HATCHES.values())]
    return f'<svg class="hatches" width="0" height="0" aria-hidden="true"><defs>{"".join(made)}</defs></svg>'


def solid(look: Style, path: str) -> str:
    """Bars; hatched, so that they can be told apart in grey, and where colours come again."""
    over = f'<path fill="url(#hatch-{list(HATCHES).index(look.marker)})" d="{path}"/>' if look.marker in HATCHES else ""
    return f'<path class="mark" d="{path}"/>{over}'


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """The path through points."""
    return "M" + "L".join(f"{at(x)} {at(y)}" for x, y in points)
