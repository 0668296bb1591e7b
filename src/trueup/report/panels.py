"""Panels drawn on matplotlib axes: one function for each kind."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trueup.report.chart_curves import FEW, LONGEST, shorten
from trueup.report.figure_spec import BarPanel, CurvePanel, ImagePanel, LinePanel, MatrixPanel, Panel, ScatterPanel
from trueup.report.palette import MARKERS, OUTLINES, Style, style

DENSE = 12  # points of a curve, beyond which markers are sparse and deviations are a band
WRITTEN = 12  # classes of a matrix with numbers in its cells, at most
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++", "||||", "oo")
SHADES = "Blues"
TURN = 35  # degrees that tick labels turn if they overlap
LETTER = 0.0625  # inches of a letter of a tick
LINE = 0.145  # inches of a line of a caption or title
TALL = {LinePanel: 2.3, BarPanel: 2.5, MatrixPanel: 3.3, ScatterPanel: 3.2}  # inches


def line_style(look: Style) -> dict[str, Any]:
    """Return matplotlib's arguments for a line."""
    shape = (0, look.dash) if look.dash else "-"
    size = 6.5 if look.marker == "*" else 4
    return {"color": look.colour, "linestyle": shape, "marker": look.marker, "linewidth": 1.5, "markersize": size}


def bar_style(look: Style) -> dict[str, Any]:
    """Return matplotlib's arguments for bars, hatched so that they differ in grey."""
    hatch = "" if look.marker == "*" else HATCHES[MARKERS.index(look.marker)]
    face = look.colour if look.marker != "*" else "0.35"
    return {"facecolor": face, "edgecolor": "white", "hatch": hatch, "linewidth": 0}


def _lines(axis: Any, panel: LinePanel, labels: Sequence[str]) -> None:
    _frame(axis, panel, [x for curve in panel.curves for x in curve.x])
    for i, curve in enumerate(panel.curves):
        look = line_style(style(curve.label, labels))
        x, y = np.array(curve.x), np.array(curve.y)
        if len(x) > DENSE:
            step = max(1, len(x) // 6)
            look["markevery"] = (i * 2 % step, step)
        axis.plot(x, y, zorder=3 if look["marker"] == "*" else 4, **look)
        if curve.spread and len(x) > DENSE:
            low, high = y - curve.spread, y + curve.spread
            axis.fill_between(x, low, high, color=look["color"], alpha=0.13, linewidth=0, zorder=2)
        elif curve.spread:
            _whiskers(axis, x, y, curve.spread, ecolor=look["color"], elinewidth=0.9, capsize=2)
    axis.margins(x=0.04, y=0.08)
    if panel.x.ticks:
        axis.set_xlim(-0.35, len(panel.x.ticks) - 0.65)


def _whiskers(axis: Any, x: Any, y: Any, spread: Sequence[float], **look: Any) -> None:
    there = np.isfinite(spread) & np.isfinite(y)
    axis.errorbar(x[there], y[there], np.array(spread)[there], fmt="none", zorder=3, **look)


def _bars(axis: Any, panel: BarPanel, labels: Sequence[str]) -> None:
    _frame(axis, panel, [])
    wide = 0.84 / len(panel.curves)
    for i, curve in enumerate(panel.curves):
        x = np.array(curve.x) + (i - (len(panel.curves) - 1) / 2) * wide
        y = np.array(curve.y)
        axis.bar(x, y, width=0.92 * wide, zorder=2, **bar_style(style(curve.label, labels)))
        if curve.spread:
            _whiskers(axis, x, y, curve.spread, ecolor="0.1", elinewidth=0.7, capsize=1.5)
    axis.grid(visible=False, axis="x")
    if len(panel.x.ticks) > 1 and panel.x.ticks[-1] == "average":
        axis.axvline(len(panel.x.ticks) - 1.5, color="0.75", linewidth=0.8)
    axis.set_xlim(-0.5, max(len(panel.x.ticks), 1) - 0.5)
    axis.tick_params(axis="x", length=0)


def _frame(axis: Any, panel: CurvePanel, values: Sequence[float]) -> None:
    """Set titles, grid and ticks."""
    x, y = panel.x, panel.y
    axis.set(xlabel=x.title, ylabel=y.title)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("0.5")
    axis.grid(visible=True, color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=7.5, color="0.5", length=3)
    if x.log:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if y.log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    found = sorted({value for value in values if np.isfinite(value)})
    words = [f"{value:g}" for value in found]
    if x.ticks:
        axis.set_xticks(range(len(x.ticks)), tick_labels(x.ticks))
        if _turned(x.ticks, axis.figure.get_figwidth() / max(1, axis.get_gridspec().ncols)):
            for text in axis.get_xticklabels():
                text.set(rotation=TURN, ha="right", rotation_mode="anchor")
    elif found and (len(found) <= 10 if x.log else len(found) <= FEW and max(map(len, words)) <= 4):
        axis.set_xticks(found, words)  # the numbers themselves, few and short
        axis.minorticks_off()


def tick_labels(words: Sequence[str]) -> list[str]:
    """Shorten tick labels to their beginnings, or to beginnings and ends if only these tell them apart."""
    half = LONGEST // 2
    ends = [word if len(word) <= LONGEST else f"{word[: half - 1]}…{word[-half:]}" for word in words]
    return next((some for some in (list(map(shorten, words)), ends) if len(set(some)) == len(words)), list(words))


def _turned(ticks: Sequence[str], inches: float) -> bool:
    return max(map(len, tick_labels(ticks)), default=0) * len(ticks) > 13 * inches


def _tick_room(panel: Panel, inches: float) -> float:
    """Return the extra height in inches for tick labels that do not fit side by side."""
    if not isinstance(panel, CurvePanel | MatrixPanel) or not panel.x.ticks:
        return 0.0
    letters = max(map(len, tick_labels(panel.x.ticks)))
    if isinstance(panel, MatrixPanel):
        return LETTER * letters if _upright(panel) else 0.0
    return LETTER * letters * math.sin(math.radians(TURN)) - 0.15 if _turned(panel.x.ticks, inches) else 0.0


def height_of(panel: Panel, inches: float) -> float:
    """Return the height of a panel of this width."""
    if isinstance(panel, ImagePanel):
        return inches * 0.94 * float(panel.image.shape[0] / panel.image.shape[1]) + 0.26
    usual = min(TALL[type(panel)], inches) if isinstance(panel, MatrixPanel | ScatterPanel) else TALL[type(panel)]
    return usual + _tick_room(panel, inches) + LINE * heading_of(panel, inches).count("\n")


def heading_of(panel: Panel, inches: float) -> str:
    """Return a panel's title in at most two lines."""
    lines = textwrap.wrap(panel.title, int(inches * 11))
    return "\n".join(lines[:2]) + ("…" if len(lines) > 2 else "")


def _upright(panel: MatrixPanel) -> bool:
    return max(map(len, tick_labels(panel.x.ticks)), default=0) * len(panel.x.ticks) > 40


def _matrix(axis: Any, panel: MatrixPanel, labels: Sequence[str]) -> None:
    from matplotlib import colormaps

    values = np.array(panel.values)
    shades = colormaps[SHADES].with_extremes(bad="0.93")
    axis.imshow(np.ma.masked_invalid(values), cmap=shades, vmin=0, vmax=100, aspect="equal")
    small = 7 if len(values) <= WRITTEN else 6
    axis.set_xticks(range(values.shape[1]), tick_labels(panel.x.ticks), fontsize=small)
    axis.set_yticks(range(values.shape[0]), tick_labels(panel.y.ticks), fontsize=small)
    axis.set(xlabel=panel.x.title, ylabel=panel.y.title)
    axis.tick_params(length=0)
    axis.spines[:].set_color("0.7")
    if _upright(panel):
        for text in axis.get_xticklabels():
            text.set(rotation=90)
    for (i, j), value in np.ndenumerate(values) if len(values) <= WRITTEN else ():
        if np.isfinite(value) and round(value):
            colour = "white" if value > 55 else "black"
            axis.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=6.5, color=colour)


def _scatter(axis: Any, panel: ScatterPanel, labels: Sequence[str]) -> None:
    x, y, group = np.array(panel.x), np.array(panel.y), np.array(panel.group)
    for i, name in enumerate(panel.groups):
        look = style(name, panel.groups)
        at = group == i
        axis.scatter(x[at], y[at], s=11, c=look.colour, marker=look.marker, linewidths=0, alpha=0.8)
    axis.set(xticks=[], yticks=[])
    axis.margins(0.05)
    axis.spines[:].set_color("0.7")


def _image(axis: Any, panel: ImagePanel, labels: Sequence[str]) -> None:
    axis.imshow(panel.image)
    for i, mask in enumerate(panel.outlines.values()):
        inside = np.asarray(mask) > 0
        if inside.any():
            edge = np.pad(inside.astype(float), 1)  # closes regions at the border
            x, y = np.arange(edge.shape[1]) - 1, np.arange(edge.shape[0]) - 1
            axis.contour(x, y, edge, [0.5], colors="black", linewidths=2.2, alpha=0.55)
            axis.contour(x, y, edge, [0.5], colors=OUTLINES[i % len(OUTLINES)], linewidths=1.2)
    high, wide = panel.image.shape[:2]
    axis.set(xlim=(-0.5, wide - 0.5), ylim=(high - 0.5, -0.5), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    axis.set_xlabel(panel.note, fontsize=7.5, labelpad=2)


DRAW: dict[type, Callable[[Any, Any, Sequence[str]], None]] = {
    LinePanel: _lines,
    BarPanel: _bars,
    MatrixPanel: _matrix,
    ScatterPanel: _scatter,
    ImagePanel: _image,
}
