"""What a figure shows, before anyone draws it: numbers, names and units. Files and pages draw the same plates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class Axis:
    """What is along an axis, with its unit; `ticks` are words in place of the numbers 0, 1, 2, …"""

    title: str
    ticks: tuple[str, ...] = ()
    log: bool = False


@dataclass(frozen=True)
class Curve:
    """Numbers under a name; `spread` is their deviation over runs, where there are several. NaN: no number."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] = ()


@dataclass(frozen=True)
class Lines:
    """Curves over a common axis."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Bars:
    """Bars side by side: a group for each tick of `x`, in it one bar of each curve, with its spread as an error bar."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Matrix:
    """Numbers in rows and columns, drawn as shades: 0 to 100."""

    title: str
    x: Axis
    y: Axis
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Dots:
    """Points in a plane without units, coloured by the group that each belongs to."""

    title: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    group: tuple[int, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Picture:
    """An image (H, W, 3) with outlines of regions (H, W), and a line of text below it."""

    title: str
    image: NDArray[Any]
    outlines: Mapping[str, NDArray[Any]]
    note: str = ""


Panel = Lines | Bars | Matrix | Dots | Picture


@dataclass(frozen=True)
class Plate:
    """A figure: panels, some to a row, under a title, with a caption that says all that one must know."""

    name: str
    """Of its files: words joined by hyphens."""
    title: str
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 2
