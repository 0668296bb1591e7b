"""How a method looks, the same in every figure of a report: told apart by those who see few colours, and in grey."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trueup.report.figure_spec import Bars, Lines, Plate

INK = "#000000"  # of the source, which all others are compared with
# The colours of Okabe and Ito without yellow, which is faint on white, and two dark ones more.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#332288")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (1.5, 1.2), (6, 1.5, 1.5, 1.5), (9, 2, 3, 2))
# Of structures on pictures, seen on light and dark tissue.
OUTLINES = ("#56B4E9", "#E69F00", "#CC79A7", "#009E73", "#D55E00", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


@dataclass(frozen=True)
class Style:
    """A colour; strokes and gaps in widths of the line, none if it is solid; a marker by its letter in matplotlib."""

    colour: str
    dash: tuple[float, ...] = ()
    marker: str = "o"


def style(label: str, labels: Sequence[str]) -> Style:
    """Of a row's label among all of a report; the source is black."""
    if label not in labels:
        raise ValueError(f"no style for {label!r} among {', '.join(labels)}: give the labels of all plates")
    plain = [other for other in labels if not _source(other)]
    if _source(label):
        at = [other for other in labels if _source(other)].index(label)
        return Style(INK, DASHES[(2 + at) % len(DASHES)], "*")
    at = plain.index(label)
    return Style(COLOURS[at % len(COLOURS)], DASHES[at % len(DASHES)], MARKERS[at % len(MARKERS)])


def labels_of(plates: Iterable[Plate]) -> tuple[str, ...]:
    """The labels of all curves of a report, each once: what `style` goes by."""
    panels = [panel for plate in plates for panel in plate.panels]
    curves = [curve for panel in panels if isinstance(panel, Lines | Bars) for curve in panel.curves]
    return tuple(dict.fromkeys(curve.label for curve in curves))


def _source(label: str) -> bool:
    return label == "source" or label.startswith("source (")
