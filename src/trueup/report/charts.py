"""Figures of the page: SVG in the page's colours, with the values for its script."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.report.chart_curves import LETTER, TURN, draw_bars, draw_lines, format_number, labels_overlap, shorten
from trueup.report.chart_marks import Drawing, coord, label_at, legend_sample, marker, series_group
from trueup.report.figure_spec import BarPanel, CurvePanel, FigureSpec, ImagePanel, MatrixPanel, Panel, ScatterPanel
from trueup.report.page_markup import embed_json, escape
from trueup.report.palette import Style, legend_of

WIDTHS = {1: 760, 2: 520, 3: 360}  # units of a drawing, by panels in a row
NARROW = 280
MOST_DIGITS = 14  # columns of a matrix with numbers in its cells
LARGEST = 640  # pixels of an image's longer side
SIDE, TALL = 64.0, 330.0  # units, at most: side of a cell, and height of all rows
FLAT = 0.72  # height of a scatter plot, relative to its width
HALF, FULL = 60.0, 75.0  # percent, from which text is black in the dark theme, and white in the light one


class ImageStore:
    """Images as PNG elements; a repeated image refers to its first use."""

    def __init__(self) -> None:
        self.known: dict[bytes, str] = {}

    def __call__(self, image: NDArray[Any]) -> str:
        """Return the element that shows an image, one unit per pixel of the original."""
        from PIL import Image

        height, width = image.shape[:2]
        drawn = Image.fromarray(image.astype("uint8"))
        drawn.thumbnail((LARGEST, LARGEST))
        file = io.BytesIO()
        drawn.save(file, "PNG", optimize=True)
        if (blob := file.getvalue()) in self.known:
            return f'<use href="#{self.known[blob]}"/>'
        name = self.known[blob] = f"image-{len(self.known)}"
        data = base64.b64encode(blob).decode()
        return f'<image id="{name}" width="{width}" height="{height}" href="data:image/png;base64,{data}"/>'


def figure_html(spec: FigureSpec, labels: Sequence[str], images: ImageStore) -> str:
    """Return a `<figure>`; `labels` are those of all figures, so that a method looks the same in each."""
    legend = legend_of(spec, labels)
    styles = {label: look for label, (look, _) in legend.items()}
    width = WIDTHS.get(spec.columns, NARROW)
    drawn = [_draw(panel, styles, width, images) for panel in spec.panels]
    name = escape(f"figure-{spec.name}")
    panels = "".join(_panel(panel, drawing) for panel, drawing in zip(spec.panels, drawn, strict=True))
    values = {"labels": list(legend), "charts": [drawing.values for drawing in drawn]}
    return (
        f'<figure id="{name}" class="figure" aria-labelledby="{name}-title">'
        f'<h3 id="{name}-title">{escape(spec.title)}</h3>{_keys(legend)}'
        f'<div class="panels columns-{min(max(spec.columns, 1), 4)}">{panels}</div>'
        f"<figcaption>{escape(spec.caption)}</figcaption>{embed_json(f'figure-{spec.name}-values', values)}</figure>"
    )


def _draw(panel: Panel, styles: Mapping[str, Style], width: int, images: ImageStore) -> Drawing:
    match panel:
        case BarPanel():
            return draw_bars(panel, styles, width)
        case CurvePanel():
            return draw_lines(panel, styles, width)
        case MatrixPanel():
            return draw_matrix(panel, width)
        case ScatterPanel():
            return draw_scatter(panel, styles, width)
        case ImagePanel():
            return draw_image(panel, styles, images)


def _panel(panel: Panel, drawing: Drawing) -> str:
    """Return a drawing with its titles as HTML, because text in SVG does not wrap."""
    above = getattr(getattr(panel, "y", None), "title", "")
    below = panel.note if isinstance(panel, ImagePanel) else getattr(getattr(panel, "x", None), "title", "")
    words = ", ".join(word for word in (panel.title, f"{above} against {below}" if above and below else below) if word)
    hint = "; arrow keys read out values" if drawing.values["stops"] else ""
    wide = f' style="max-width:{drawing.width}px"' if drawing.kind == "field" else ""
    focus = ' tabindex="0"' if drawing.values["stops"] else ""
    return (
        f'<div class="panel"{wide}>'
        f"{f'<h4>{escape(panel.title)}</h4>' if panel.title else ''}{f'<p>{escape(above)}</p>' if above else ''}"
        f'<div class="chart {drawing.kind}"{focus} role="img" aria-label="{escape(words + hint)}">'
        f'<svg viewBox="0 0 {drawing.width} {drawing.height}" aria-hidden="true">{drawing.svg}</svg></div>'
        f"{f'<p class=below>{escape(below)}</p>' if below else ''}</div>"
    )


def _keys(legend: Mapping[str, tuple[Style, str]]) -> str:
    if not legend:
        return ""
    buttons = [
        f'<button type="button" aria-pressed="true" data-series="{i}">{legend_sample(*sample)}{escape(label)}</button>'
        for i, (label, sample) in enumerate(legend.items())
    ]
    return f'<div class="keys" role="group" aria-label="Shown in this figure">{"".join(buttons)}</div>'


def draw_matrix(panel: MatrixPanel, width: int) -> Drawing:
    """Draw shades of one colour, from none at 0 to full at 100."""
    rows, columns = len(panel.values), max((len(row) for row in panel.values), default=0)
    above = [panel.x.ticks[i] if i < len(panel.x.ticks) else str(i) for i in range(columns)]
    beside = [panel.y.ticks[i] if i < len(panel.y.ticks) else str(i) for i in range(rows)]
    left = 10 + LETTER * max((len(shorten(word)) for word in beside), default=1)
    side = min((width - left - 2) / max(columns, 1), SIDE, TALL / max(rows, 1))
    turned = labels_overlap([(0, shorten(word)) for word in above], side * columns)
    svg, stops = "", []
    for i, row in enumerate(panel.values):
        svg += label_at(left - 7, (i + 0.5) * side + 5, shorten(beside[i]), anchor="end")
        for j, value in enumerate(row):
            x, y = left + j * side, 1 + i * side
            svg += _shade(x, y, side, value, digits=columns <= MOST_DIGITS)
            words = f"{panel.y.title} {beside[i]}, {panel.x.title} {above[j]}"
            number = format_number(value) if math.isfinite(value) else "–"
            stops.append((float(coord(x + side / 2)), float(coord(y + side / 2)), words, [[None, number, None]]))
    for j, word in enumerate(above):
        x, y = left + (j + 0.5) * side + 4 * turned, rows * side + 17 - 2 * turned
        svg += label_at(x, y, shorten(word), anchor="end" if turned else "middle", turn=TURN * turned)
    height = rows * side + (24 if not turned else 16 + 0.62 * LETTER * max(len(shorten(word)) for word in above))
    values = {"stops": stops, "plane": True, "wide": columns, "side": float(coord(side))}
    return Drawing("field", round(left + columns * side + 2), height, svg, values)


def _shade(x: float, y: float, side: float, value: float, *, digits: bool) -> str:
    full = min(max(value, 0.0), 100.0) if math.isfinite(value) else 0.0
    size = coord(side - 1)
    box = f'<rect x="{coord(x)}" y="{coord(y)}" width="{size}" height="{size}" style="--v:{full:.0f}%"/>'
    if not digits or not math.isfinite(value):
        return box
    kind = "full" if full >= FULL else "half" if full >= HALF else "pale"
    place = f'x="{coord(x + side / 2)}" y="{coord(y + side / 2 + 4)}"'
    return box + f'<text class="{kind}" {place} text-anchor="middle">{value:.0f}</text>'


def draw_scatter(panel: ScatterPanel, styles: Mapping[str, Style], width: int) -> Drawing:
    """Draw points, centred, with the same unit on both axes."""
    places = [(a, b) for a, b in zip(panel.x, panel.y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    xs, ys = [a for a, _ in places] or [0.0], [b for _, b in places] or [0.0]
    height = FLAT * width
    unit = min((width - 24) / (max(xs) - min(xs) or 1.0), (height - 24) / (max(ys) - min(ys) or 1.0))
    middle = (max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2
    paths: dict[int, str] = {}
    stops = []
    for a, b, member in zip(panel.x, panel.y, panel.group, strict=True):
        if math.isfinite(a) and math.isfinite(b):
            x, y = width / 2 + (a - middle[0]) * unit, height / 2 - (b - middle[1]) * unit
            number = list(styles).index(panel.groups[member])
            paths[number] = paths.get(number, "") + marker(styles[panel.groups[member]], x, y)
            stops.append((float(coord(x)), float(coord(y)), "", [[number, "", float(coord(y))]]))
    looks = list(styles.values())
    svg = "".join(series_group(n, looks[n], f'<path class="mark" d="{d}"/>') for n, d in sorted(paths.items()))
    stops.sort(key=lambda stop: (stop[3][0][0], stop[0]))
    return Drawing("cloud", width, height, svg, {"stops": stops, "plane": True, "near": 14})


def draw_image(panel: ImagePanel, styles: Mapping[str, Style], images: ImageStore) -> Drawing:
    """Draw an image with outlines of regions, as paths that stay sharp at any size."""
    height, width = panel.image.shape[:2]
    svg = images(panel.image)
    for name, mask in panel.outlines.items():
        path = outline(mask)
        number, look = list(styles).index(name), styles[name]
        svg += series_group(number, look, f'<path class="under" d="{path}"/><path class="outline" d="{path}"/>')
    return Drawing("picture", width, height, svg, {"stops": []})


def outline(mask: NDArray[Any]) -> str:
    """Return the path along pixel edges between inside and outside."""
    inside = np.pad(np.asarray(mask) > 0, 1)
    across = inside[1:, 1:-1] != inside[:-1, 1:-1]  # an edge above pixel (y, x)
    down = inside[1:-1, 1:] != inside[1:-1, :-1]  # an edge left of it
    path = [f"M{x} {y}h{n}" for y, row in enumerate(across) for x, n in _runs_of_true(row)]
    path += [f"M{x} {y}v{n}" for x, row in enumerate(down.T) for y, n in _runs_of_true(row)]
    return "".join(path)


def _runs_of_true(row: NDArray[Any]) -> list[tuple[int, int]]:
    """Return start and length of each run of edges."""
    steps = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
    return [(int(start), int(end - start)) for start, end in zip(steps[::2], steps[1::2], strict=True)]
