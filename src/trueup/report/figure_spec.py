"""Figures as data: numbers, names and units. The page and the image files draw the same figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class Axis:
    """An axis with its title and unit; `ticks` are words in place of the numbers from 0 on."""

    title: str
    ticks: tuple[str, ...] = ()
    log: bool = False


@dataclass(frozen=True)
class Curve:
    """Named numbers; `spread` is their deviation over runs, if there are several. NaN: no number."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] = ()


@dataclass(frozen=True)
class CurvePanel:
    """Curves over a common axis."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]


class LinePanel(CurvePanel):
    """Curves drawn as lines, their spread as bands."""


class BarPanel(CurvePanel):
    """Curves drawn as bars: a group for each tick of `x`, with the spread as error bars."""


@dataclass(frozen=True)
class MatrixPanel:
    """Numbers from 0 to 100 in rows and columns, drawn as shades."""

    title: str
    x: Axis
    y: Axis
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ScatterPanel:
    """Points in a plane without units, coloured by group."""

    title: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    group: tuple[int, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class ImagePanel:
    """An image (H, W, 3) with outlines of regions (H, W), and a line of text below it."""

    title: str
    image: NDArray[Any]
    outlines: Mapping[str, NDArray[Any]]
    note: str = ""


Panel = CurvePanel | MatrixPanel | ScatterPanel | ImagePanel


@dataclass(frozen=True)
class FigureSpec:
    """A figure: panels in rows of `columns`, with a title and a self-contained caption."""

    name: str  # stem of its file names: words joined by hyphens
    title: str
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 2
