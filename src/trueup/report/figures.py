"""Plates as files for print: PNG, SVG and PDF, the same bytes for the same plate."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trueup.report.figure_spec import Bars, Dots, Lines, Matrix, Panel, Picture, Plate
from trueup.report.metrics import known
from trueup.report.palette import OUTLINES, labels_of, style
from trueup.report.panels import DRAW, tick_room

FORMS = ("png", "svg", "pdf")
WIDE, NARROW = 7.2, 4.6  # inches: across a page, and for a single panel of curves
TITLE, LINE, MARGIN = 0.36, 0.145, 0.08  # inches: the title, a line of the caption, the edges
FEW = 5  # curves or bars, up to which a single panel is narrow
KEY = 0.2  # a row of the legend
HIGHEST = 10.5  # inches, that a page has
LETTERS = 18  # of the caption, to an inch
TALL = {Lines: 2.3, Bars: 2.5, Matrix: 3.3, Dots: 3.2}
# Text stays text in SVG: it can be searched, selected and edited, and a reader's font stands in for a missing one.
FILES: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "trueup", "pdf.fonttype": 42}
FONT: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.unicode_minus": True,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,
}
NO_DATE: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def draw(plate: Plate, labels: Sequence[str] = ()) -> Any:
    """A plate as a matplotlib figure. With the `labels` of all plates of a report a method looks alike in each."""
    import matplotlib

    with matplotlib.rc_context({**FILES, **FONT}):
        return _draw(plate, labels or labels_of([plate]))


def save(plate: Plate, folder: str | Path, forms: Collection[str] = FORMS, labels: Sequence[str] = ()) -> list[Path]:
    """Draw it into `folder`, a file for each form: the files."""
    import matplotlib

    for form in forms:
        known(form, FORMS, "form of figures")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with matplotlib.rc_context({**FILES, **FONT}):
        for part in sheets(plate, labels or labels_of([plate])):
            figure = _draw(part, labels or labels_of([plate]))
            for form in forms:
                files.append(folder / f"{part.name}.{form}")
                figure.savefig(files[-1], dpi=200, metadata=NO_DATE.get(form))
    return files


def sheets(plate: Plate, labels: Sequence[str]) -> list[Plate]:
    """The plate, or several with some of its rows each, where one would be higher than a page."""
    sheet = _Sheet(plate, labels)
    fit = max(1, int((HIGHEST - sheet.top - sheet.bottom) / sheet.row))
    if sheet.rows <= fit:
        return [plate]
    count = math.ceil(sheet.rows / fit)
    size = math.ceil(sheet.rows / count) * sheet.columns
    pieces = [plate.panels[i : i + size] for i in range(0, len(plate.panels), size)]
    return [
        replace(plate, name=f"{plate.name}-{i}", title=f"{plate.title} ({i} of {len(pieces)})", panels=piece)
        for i, piece in enumerate(pieces, 1)
    ]


class _Sheet:
    """Where things lie on a plate's paper, in inches."""

    def __init__(self, plate: Plate, labels: Sequence[str]) -> None:
        self.columns = max(1, min(plate.columns, len(plate.panels)))
        self.rows = math.ceil(len(plate.panels) / self.columns)
        self.wide = NARROW if _small(plate) else WIDE
        self.title = textwrap.wrap(plate.title, int(self.wide * 11.5))
        self.caption = textwrap.wrap(plate.caption, int(self.wide * LETTERS))
        self.keys = _keys(plate, labels, int((self.wide - 0.75) / 0.07))
        lines = [key.get_label().split("\n") for key in self.keys]
        letters = max((len(line) for some in lines for line in some), default=1)
        self.across = max(1, min(len(lines), int((self.wide - 0.3) / (0.45 + 0.07 * letters))))
        self.head = TITLE + 0.19 * (len(self.title) - 1)
        wrapped = sum(len(some) - 1 for some in lines)
        self.top = self.head + KEY * math.ceil(len(lines) / self.across) + LINE * wrapped
        self.bottom = LINE * len(self.caption) + 2 * MARGIN
        self.row = max(_tall(panel, self.wide / self.columns) for panel in plate.panels)
        self.high = self.top + self.bottom + self.rows * self.row


def _draw(plate: Plate, labels: Sequence[str]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sheet = _Sheet(plate, labels)
    wide, high = sheet.wide, sheet.high
    figure: Any = Figure(figsize=(wide, high), layout="constrained")
    FigureCanvasAgg(figure)
    inside = (0.0, sheet.bottom / high, 1.0, 1 - (sheet.top + sheet.bottom) / high)
    figure.get_layout_engine().set(rect=inside, w_pad=0.07, h_pad=0.06)
    left, caption = MARGIN / wide, "\n".join(sheet.caption)
    _words(figure, left, 1 - MARGIN / high, "\n".join(sheet.title), va="top", fontsize=10, fontweight="bold")
    _words(figure, left, MARGIN / high, caption, va="bottom", fontsize=7.5, color="0.25", linespacing=1.3)
    _panels(figure, plate, labels, sheet.rows, sheet.columns)
    if sheet.keys:
        at = (left, 1 - sheet.head / high)
        handle = 3.0 if labels_of([plate]) else 1.2
        spaces = {"borderpad": 0.1, "borderaxespad": 0, "handlelength": handle, "columnspacing": 1.4}
        look = {"loc": "upper left", "bbox_to_anchor": at, "ncols": sheet.across, "frameon": False, "fontsize": 8}
        figure.legend(handles=sheet.keys, **look, **spaces, labelspacing=0.3).set_in_layout(False)
    return figure


def _small(plate: Plate) -> bool:
    """Whether half a page is wide enough."""
    if len(plate.panels) > 1 or not isinstance(panel := plate.panels[0], Lines | Bars):
        return False
    return len(panel.curves) * (len(panel.x.ticks) if isinstance(panel, Bars) else 1) <= FEW


def _words(figure: Any, x: float, y: float, text: str, **look: Any) -> None:
    figure.text(x, y, text, ha="left", **look).set_in_layout(False)


def _tall(panel: Panel, wide: float) -> float:
    if isinstance(panel, Picture):
        return wide * 0.94 * float(panel.image.shape[0] / panel.image.shape[1]) + 0.26
    usual = min(TALL[type(panel)], wide) if isinstance(panel, Matrix | Dots) else TALL[type(panel)]
    return usual + tick_room(panel, wide) + LINE * _heading(panel, wide).count("\n")


def _heading(panel: Panel, wide: float) -> str:
    """A panel's title in two lines at most."""
    lines = textwrap.wrap(panel.title, int(wide * 11))
    return "\n".join(lines[:2]) + ("…" if len(lines) > 2 else "")


def _panels(figure: Any, plate: Plate, labels: Sequence[str], rows: int, columns: int) -> None:
    grid = figure.add_gridspec(rows, columns)
    for i, panel in enumerate(plate.panels):
        axis = figure.add_subplot(grid[i // columns, i % columns])
        DRAW[type(panel)](axis, panel, labels)
        left = plate.panels[i - 1] if i % columns else None
        if isinstance(panel, Lines | Bars) and isinstance(left, Lines | Bars) and left.y.title == panel.y.title:
            axis.set_ylabel("")
        above = plate.panels[i - columns] if i >= columns else None
        if not isinstance(panel, Picture) or above is None or above.title != panel.title:
            side: Any = "center" if isinstance(panel, Picture) else "left"
            axis.set_title(
                _heading(panel, figure.get_figwidth() / columns), fontsize=8.5 if columns < 3 else 7.8, loc=side
            )
    if any(isinstance(panel, Matrix) for panel in plate.panels):
        shades = next(image for axis in figure.axes for image in axis.get_images())
        bar = figure.colorbar(shades, ax=figure.axes, fraction=0.025, pad=0.015, aspect=28)
        bar.set_label("% of the true class", fontsize=7.5)
        bar.ax.tick_params(labelsize=7, length=2)
        bar.outline.set_visible(False)


def _keys(plate: Plate, labels: Sequence[str], letters: int) -> list[Any]:
    """What a legend shows: methods, classes of dots or structures of masks; `letters` fit into a line."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from trueup.report.panels import bar_look, line_look

    groups = dict.fromkeys(name for p in plate.panels if isinstance(p, Dots) for name in p.groups)
    parts = dict.fromkeys(name for p in plate.panels if isinstance(p, Picture) for name in p.outlines)
    keys: list[Any] = []
    for name in sorted(labels_of([plate]), key=labels.index):
        if all(isinstance(panel, Bars) for panel in plate.panels):
            keys.append(Patch(label=name, **bar_look(name, labels)))
        else:
            keys.append(Line2D([], [], label=name, **line_look(name, labels)))
    for name in groups:
        look = style(name, list(groups))
        keys.append(Line2D([], [], label=name, linestyle="", marker=look.marker, color=look.colour, markersize=5))
    for i, name in enumerate(parts):
        keys.append(Line2D([], [], label=name, color=OUTLINES[i % len(OUTLINES)], linewidth=2))
    for key in keys:
        key.set_label("\n".join(textwrap.wrap(key.get_label(), letters)))
    return keys
