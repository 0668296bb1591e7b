"""Plates as files for print: PNG, SVG and PDF, the same bytes for the same plate."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from trueup.report.marks import DRAW
from trueup.report.metrics import known
from trueup.report.palette import labels_of, style
from trueup.report.plates import Bars, Dots, Lines, Matrix, Panel, Picture, Plate

FORMS = ("png", "svg", "pdf")
WIDE, NARROW = 7.2, 4.6  # inches: across a page, and for a single panel of curves
TITLE, LINE, MARGIN = 0.36, 0.145, 0.08  # inches: the title, a line of the caption, the edges
FEW = 5  # curves or bars, up to which a single panel is narrow
KEY = 0.2  # a row of the legend
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
    figure = draw(plate, labels)
    files = [folder / f"{plate.name}.{form}" for form in forms]
    with matplotlib.rc_context({**FILES, **FONT}):
        for file in files:
            figure.savefig(file, dpi=200, metadata=NO_DATE.get(file.suffix[1:]))
    return files


def _draw(plate: Plate, labels: Sequence[str]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(1, min(plate.columns, len(plate.panels)))
    rows = math.ceil(len(plate.panels) / columns)
    wide = NARROW if _small(plate) else WIDE
    title = textwrap.wrap(plate.title, int(wide * 11.5))
    caption = textwrap.wrap(plate.caption, int(wide * LETTERS))
    keys = _keys(plate, labels)
    letters = max((len(key.get_label()) for key in keys), default=1)
    across = max(1, min(len(keys), int((wide - 0.3) / (0.45 + 0.07 * letters))))
    top = TITLE + 0.19 * (len(title) - 1) + KEY * math.ceil(len(keys) / across)
    bottom = LINE * len(caption) + 2 * MARGIN
    high = top + bottom + rows * max(_tall(panel, wide / columns) for panel in plate.panels)
    figure: Any = Figure(figsize=(wide, high), layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0.0, bottom / high, 1.0, 1 - (top + bottom) / high), w_pad=0.07, h_pad=0.06)
    left = MARGIN / wide
    _words(figure, left, 1 - MARGIN / high, "\n".join(title), va="top", fontsize=10, fontweight="bold")
    _words(figure, left, MARGIN / high, "\n".join(caption), va="bottom", fontsize=7.5, color="0.25", linespacing=1.3)
    _panels(figure, plate, labels, rows, columns)
    if keys:
        at = (left, 1 - (TITLE + 0.19 * (len(title) - 1)) / high)
        handle = 3.0 if labels_of([plate]) else 1.2
        spaces = {"borderpad": 0.1, "borderaxespad": 0, "handlelength": handle, "columnspacing": 1.4}
        look = {"loc": "upper left", "bbox_to_anchor": at, "ncols": across, "frameon": False, "fontsize": 8}
        figure.legend(handles=keys, **look, **spaces, labelspacing=0.3).set_in_layout(False)
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
    return min(TALL[type(panel)], wide) if isinstance(panel, Matrix | Dots) else TALL[type(panel)]


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
            axis.set_title(panel.title, fontsize=8.5 if columns < 3 else 7.8, loc=side)
    if any(isinstance(panel, Matrix) for panel in plate.panels):
        shades = next(image for axis in figure.axes for image in axis.get_images())
        bar = figure.colorbar(shades, ax=figure.axes, fraction=0.025, pad=0.015, aspect=28)
        bar.set_label("% of the true class", fontsize=7.5)
        bar.ax.tick_params(labelsize=7, length=2)
        bar.outline.set_visible(False)


def _keys(plate: Plate, labels: Sequence[str]) -> list[Any]:
    """What a legend shows: methods, classes of dots or structures of masks."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from trueup.report.marks import OUTLINES, bar_look, line_look

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
    return keys
