"""Styles of methods, the same in every figure of a report, and distinct without colour vision and in grey."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trueup.report.figure_spec import CurvePanel, FigureSpec, ImagePanel, LinePanel, ScatterPanel

INK = "#000000"  # of the source
# The colours of Okabe and Ito without yellow, which is faint on white, and two dark ones more.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#332288")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (1.5, 1.2), (6, 1.5, 1.5, 1.5), (9, 2, 3, 2))
# Of structures on images, visible on light and dark tissue.
OUTLINES = ("#56B4E9", "#E69F00", "#CC79A7", "#009E73", "#D55E00", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


@dataclass(frozen=True)
class Style:
    """A colour, a dash pattern in line widths (empty if solid), and a matplotlib marker."""

    colour: str
    dash: tuple[float, ...] = ()
    marker: str = "o"


def style(label: str, labels: Sequence[str]) -> Style:
    """Return the style of a label among all labels of a report; the source is black."""
    if label not in labels:
        raise ValueError(f"no style for {label!r} among {', '.join(labels)}: give the labels of all figures")
    plain = [other for other in labels if not _is_source(other)]
    if label not in plain:
        at = [other for other in labels if _is_source(other)].index(label)
        return Style(INK, DASHES[(2 + at) % len(DASHES)], "*")
    at = plain.index(label)
    return Style(COLOURS[at % len(COLOURS)], DASHES[at % len(DASHES)], MARKERS[at % len(MARKERS)])


def curve_labels(figures: Iterable[FigureSpec]) -> tuple[str, ...]:
    """Return the labels of all curves of a report, each once, as `style` expects them."""
    panels = [panel for figure in figures for panel in figure.panels if isinstance(panel, CurvePanel)]
    return tuple(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))


def legend_of(figure: FigureSpec, labels: Sequence[str]) -> dict[str, tuple[Style, str]]:
    """Return style and kind of all that a figure shows by name: curves, groups of points, and outlines of regions."""
    kind = "line" if any(isinstance(panel, LinePanel) for panel in figure.panels) else "bar"
    groups = dict.fromkeys(name for panel in figure.panels if isinstance(panel, ScatterPanel) for name in panel.groups)
    regions = dict.fromkeys(name for panel in figure.panels if isinstance(panel, ImagePanel) for name in panel.outlines)
    found = {label: (style(label, labels), kind) for label in curve_labels([figure])}
    for name in groups:
        found.setdefault(name, (style(name, list(groups)), "dot"))
    for i, name in enumerate(regions):
        found.setdefault(name, (Style(OUTLINES[i % len(OUTLINES)]), "outline"))
    return found


def _is_source(label: str) -> bool:
    return label == "source" or label.startswith("source (")
