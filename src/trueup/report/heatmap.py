"""Heat map of a stress test: accuracies as numbers, differences from the source as colours."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from trueup.report.stress_tables import StressRow, StressTest

CLIP = 30.0  # points; colours saturate beyond
COLOURS = "RdBu"  # distinct with red-green colour blindness
GAP = 0.3  # of a cell, before the last column


def heatmap(test: StressTest, path: Path) -> list[Path]:
    """Write a stress test as PNG and SVG, and return the files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = len(test.rows), len(test.scenarios)
    label = max(len(row.label) for row in test.rows)
    wide, high = 0.52 * (columns + 1 + GAP) + 0.085 * label + 1.1, 0.36 * rows + 2.2
    figure: Any = Figure(figsize=(max(wide, 7.0), high), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    for y, row in enumerate(test.rows):
        _row(axis, test, row, y)
    axis.set(xlim=(-0.5, columns + GAP + 0.5), ylim=(rows - 0.5, -0.5))
    axis.set_yticks(range(rows), [row.label for row in test.rows], fontsize=9)
    axis.set_xticks([*range(columns), columns + GAP], [*test.scenarios, "worst"], fontsize=9)
    axis.tick_params(length=0, top=False, bottom=False, labeltop=True, labelbottom=False)
    for text in axis.get_xticklabels():
        text.set(rotation=40, ha="left", rotation_mode="anchor")
    axis.spines[:].set_visible(False)
    title = f"{test.title}: {test.metric.unit} under stress"
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    bar = figure.colorbar(_scale(), ax=axis, fraction=0.025, pad=0.015, extend="both", aspect=25)
    bar.set_label("difference from source, points", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    figure.supxlabel(_caption(test, int(figure.get_figwidth() * 15.5)), fontsize=8, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path, path.with_suffix(".svg")]
    for file in files:
        figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _scale() -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(-CLIP, CLIP), COLOURS)


def _row(axis: Any, test: StressTest, row: StressRow, y: int) -> None:
    for x, cell in enumerate(row.cells):
        if cell is None:
            _cell(axis, x, y, "–", None)
        else:
            _cell(axis, x, y, test.metric.text(cell.mean), cell.difference, bold=x == row.worst)
    cell = None if row.worst is None else row.cells[row.worst]
    difference = None if cell is None else cell.difference
    text = "" if difference is None else test.metric.text(difference, "+").replace("-", "−")
    _cell(axis, len(row.cells) + GAP, y, text, difference, bold=True)


def _cell(axis: Any, x: float, y: int, text: str, difference: float | None, *, bold: bool = False) -> None:
    """Draw a square in the colour of a difference, with black or white text, whichever has more contrast."""
    from matplotlib.patches import Rectangle

    grey = 1.0 if text in ("–", "") else 0.93
    face = (grey, grey, grey, 1.0) if difference is None else tuple(_scale().to_rgba(100 * difference))
    axis.add_patch(Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, facecolor=face, linewidth=0))
    light = 0.2126 * face[0] + 0.7152 * face[1] + 0.0722 * face[2]
    colour, weight = "black" if light > 0.5 else "white", "bold" if bold else "normal"
    axis.text(x, y, text, ha="center", va="center", fontsize=8, color=colour, fontweight=weight)


def _caption(test: StressTest, width: int) -> str:
    words = (
        f"Cells: {test.metric.title}; – is missing. Colour: difference from the frozen source in the same scenario, "
        f"target and seed, in points (beyond ±{CLIP:.0f} it stays the same): blue helps, red harms, grey is the source "
        "itself. Bold: the scenario where a method falls lowest below the source, or gains least; the last column says "
        f"by how much. {test.caption.partition('. ')[0]}."
    )
    return "\n".join(textwrap.wrap(words, width))
