"""Figures as PNG, SVG and PDF files, with the same bytes for the same figure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trueup.report.figure_spec import BarPanel, CurvePanel, FigureSpec, ImagePanel, MatrixPanel
from trueup.report.metrics import check_name
from trueup.report.palette import curve_labels, legend_of
from trueup.report.panels import DRAW, LINE, bar_style, heading_of, height_of, line_style

FORMS = ("png", "svg", "pdf")
WIDE, NARROW = 7.2, 4.6  # inches: the width of a page, and of a single panel of curves
TITLE, MARGIN = 0.36, 0.08  # inches: the title, the margins
FEW = 5  # curves or bars of a narrow single panel, at most
KEY = 0.2  # inches: a row of the legend
HIGHEST = 10.5  # inches: the height of a page
LETTERS = 18  # of the caption, per inch
# Text stays text in SVG, so that it can be searched, selected and edited.
FILES: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "trueup", "pdf.fonttype": 42}
FONT: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.unicode_minus": True,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,
}
NO_DATE: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def draw_figure(spec: FigureSpec, labels: Sequence[str] = ()) -> Any:
    """Draw a matplotlib figure. `labels` of all figures of a report give a method the same style in each."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = labels or curve_labels([spec])
    with rc_context({**FILES, **FONT}):
        layout = _Layout(spec, labels)
        wide, high = layout.wide, layout.high
        figure: Any = Figure(figsize=(wide, high), layout="constrained")
        FigureCanvasAgg(figure)
        inside = (0.0, layout.bottom / high, 1.0, 1 - (layout.top + layout.bottom) / high)
        figure.get_layout_engine().set(rect=inside, w_pad=0.07, h_pad=0.06)
        left = MARGIN / wide
        head = {"va": "top", "fontsize": 10, "fontweight": "bold"}
        foot = {"va": "bottom", "fontsize": 7.5, "color": "0.25", "linespacing": 1.3}
        for y, lines, look in ((1 - MARGIN / high, layout.title, head), (MARGIN / high, layout.caption, foot)):
            figure.text(left, y, "\n".join(lines), ha="left", **look).set_in_layout(False)
        _panels(figure, spec, labels, layout.rows, layout.columns)
        if layout.keys:
            at = (left, 1 - layout.head / high)
            handle = 3.0 if curve_labels([spec]) else 1.2
            spaces = {"borderpad": 0.1, "borderaxespad": 0, "handlelength": handle, "columnspacing": 1.4}
            look = {"loc": "upper left", "bbox_to_anchor": at, "ncols": layout.across, "frameon": False, "fontsize": 8}
            figure.legend(handles=layout.keys, **look, **spaces, labelspacing=0.3).set_in_layout(False)
        return figure


def save_figure(
    spec: FigureSpec, folder: str | Path, forms: Collection[str] = FORMS, labels: Sequence[str] = ()
) -> list[Path]:
    """Write a figure into `folder` in each form, and return the files."""
    from matplotlib import rc_context

    for form in forms:
        check_name(form, FORMS, "form of figures")
    folder, labels, files = Path(folder), labels or curve_labels([spec]), []
    folder.mkdir(parents=True, exist_ok=True)
    for part in split_pages(spec, labels):
        figure = draw_figure(part, labels)
        for form in forms:
            files.append(folder / f"{part.name}.{form}")
            with rc_context({**FILES, **FONT}):
                figure.savefig(files[-1], dpi=200, metadata=NO_DATE.get(form))
    return files


def split_pages(spec: FigureSpec, labels: Sequence[str]) -> list[FigureSpec]:
    """Split a figure that is higher than a page into several with some of its rows each."""
    layout = _Layout(spec, labels)
    fit = max(1, int((HIGHEST - layout.top - layout.bottom) / layout.row))
    if layout.rows <= fit:
        return [spec]
    count = math.ceil(layout.rows / fit)
    size = math.ceil(layout.rows / count) * layout.columns
    pieces = [spec.panels[i : i + size] for i in range(0, len(spec.panels), size)]
    return [
        replace(spec, name=f"{spec.name}-{i}", title=f"{spec.title} ({i} of {len(pieces)})", panels=piece)
        for i, piece in enumerate(pieces, 1)
    ]


class _Layout:
    """Positions on the paper, in inches."""

    def __init__(self, spec: FigureSpec, labels: Sequence[str]) -> None:
        self.columns = max(1, min(spec.columns, len(spec.panels)))
        self.rows = math.ceil(len(spec.panels) / self.columns)
        self.wide = WIDE
        if len(spec.panels) == 1 and isinstance(panel := spec.panels[0], CurvePanel):
            marks = len(panel.curves) * (len(panel.x.ticks) if isinstance(panel, BarPanel) else 1)
            self.wide = NARROW if marks <= FEW else WIDE
        self.title = textwrap.wrap(spec.title, int(self.wide * 11.5))
        self.caption = textwrap.wrap(spec.caption, int(self.wide * LETTERS))
        self.keys = _keys(spec, labels, int((self.wide - 0.75) / 0.07))
        lines = [key.get_label().split("\n") for key in self.keys]
        letters = max((len(line) for some in lines for line in some), default=1)
        self.across = max(1, min(len(lines), int((self.wide - 0.3) / (0.45 + 0.07 * letters))))
        self.head = TITLE + 0.19 * (len(self.title) - 1)
        wrapped = sum(len(some) - 1 for some in lines)
        self.top = self.head + KEY * math.ceil(len(lines) / self.across) + LINE * wrapped
        self.bottom = LINE * len(self.caption) + 2 * MARGIN
        self.row = max(height_of(panel, self.wide / self.columns) for panel in spec.panels)
        self.high = self.top + self.bottom + self.rows * self.row


def _panels(figure: Any, spec: FigureSpec, labels: Sequence[str], rows: int, columns: int) -> None:
    grid = figure.add_gridspec(rows, columns)
    for i, panel in enumerate(spec.panels):
        axis = figure.add_subplot(grid[i // columns, i % columns])
        DRAW[type(panel)](axis, panel, labels)
        left = spec.panels[i - 1] if i % columns else None
        if isinstance(panel, CurvePanel) and isinstance(left, CurvePanel) and left.y.title == panel.y.title:
            axis.set_ylabel("")
        above = spec.panels[i - columns] if i >= columns else None
        if not isinstance(panel, ImagePanel) or above is None or above.title != panel.title:
            side: Any = "center" if isinstance(panel, ImagePanel) else "left"
            title = heading_of(panel, figure.get_figwidth() / columns)
            axis.set_title(title, fontsize=8.5 if columns < 3 else 7.8, loc=side)
    if any(isinstance(panel, MatrixPanel) for panel in spec.panels):
        shades = next(image for axis in figure.axes for image in axis.get_images())
        bar = figure.colorbar(shades, ax=figure.axes, fraction=0.025, pad=0.015, aspect=28)
        bar.set_label("% of the true class", fontsize=7.5)
        bar.ax.tick_params(labelsize=7, length=2)
        bar.outline.set_visible(False)


def _keys(spec: FigureSpec, labels: Sequence[str], letters: int) -> list[Any]:
    """Return legend entries for methods, groups of points and outlines; `letters` fit into a line."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys: list[Any] = []
    legend = legend_of(spec, labels)
    for name in sorted(legend, key=[*labels, *legend].index):
        look, kind = legend[name]
        if kind == "bar":
            keys.append(Patch(**bar_style(look)))
        elif kind == "line":
            keys.append(Line2D([], [], **line_style(look)))
        elif kind == "dot":
            keys.append(Line2D([], [], linestyle="", marker=look.marker, color=look.colour, markersize=5))
        else:
            keys.append(Line2D([], [], color=look.colour, linewidth=2))
        keys[-1].set_label("\n".join(textwrap.wrap(name, letters)))
    return keys
