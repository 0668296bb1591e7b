"""Contact sheets: some cases of each domain as networks see them, with the outlines of the masks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from trueup.data.check_masks import Progress
from trueup.data.datasets.mask_datasets import Structures
from trueup.data.domains import BrokenImageError
from trueup.data.slices import LabelledCase

CASES, COLUMNS = 12, 4  # per sheet
TILE, GAP, NAME, HEAD = 2.0, 0.12, 0.2, 0.5  # inches
DOTS = 150  # per inch
SHARPEST = 400  # pixels of a tile
LETTERS, NAMED = 30, 6  # letters that fit below a tile, structures that fit into the heading
PAPER, INK = "#111317", "#d7dae0"
COLOURS = ("#22d3ee", "#f472b6", "#a3e635", "#fb923c", "#818cf8", "#facc15")


def draw_sheets(
    name: str, domains: Mapping[str, Sequence[LabelledCase]], structures: Structures, folder: Path,
    progress: Progress = lambda done, of: None,
) -> list[Path]:  # fmt: skip
    """Draw one sheet per domain, FOLDER/NAME-DOMAIN.png; `structures` maps names to classes of the masks."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for done, (domain, cases) in enumerate(domains.items(), 1):
        files.append(folder / f"{name}-{domain}.png")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the font may lack letters of a name
            _sheet(f"{name}: {domain}", cases, structures).savefig(files[-1])
        progress(done, len(domains))
    return files


def _sheet(title: str, cases: Sequence[LabelledCase], structures: Structures) -> Any:
    """Draw up to twelve cases, evenly spaced over all."""
    from matplotlib.figure import Figure

    numbers = np.linspace(0, len(cases) - 1, min(CASES, len(cases))).round().astype(int)
    wide, tall = COLUMNS * (TILE + GAP) + GAP, HEAD - (-len(numbers) // COLUMNS) * (TILE + NAME + GAP)
    figure = Figure(figsize=(wide, tall), dpi=DOTS, facecolor=PAPER)
    centre = 1 - HEAD / 2 / tall
    figure.text(GAP / wide, centre, title, color=INK, size=12, weight="bold", va="center", parse_math=False)
    outlines = list(zip(structures, structures.values(), cycle(COLOURS), strict=False))
    right = 1 - GAP / wide
    legend = [(structure, colour) for structure, _, colour in outlines]
    for structure, colour in reversed(legend if len(legend) <= NAMED else [*legend[:NAMED], ("…", INK)]):
        text = figure.text(right, centre, structure, color=colour, size=11, weight="bold", parse_math=False)
        text.set(ha="right", va="center")
        right = text.get_window_extent().x0 / figure.bbox.width - 2 * GAP / wide
    for i, number in enumerate(numbers):
        row, column = divmod(i, COLUMNS)
        left, top = GAP + column * (TILE + GAP), HEAD + row * (TILE + NAME + GAP)
        axes = figure.add_axes((left / wide, 1 - (top + TILE) / tall, TILE / wide, TILE / tall))
        _tile(axes, cases[number], [(classes, colour) for _, classes, colour in outlines])
    return figure


def _tile(axes: Any, case: LabelledCase, outlines: Sequence[tuple[tuple[int, ...], str]]) -> None:
    """Draw the slice of a case that shows most, and its name below."""
    from matplotlib.patheffects import withStroke

    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], facecolor="#1b1e24")
    axes.spines[:].set_visible(False)
    called = case.name
    try:
        volume = case.read()
        areas = np.zeros(1) if volume.mask is None else np.count_nonzero(volume.mask, axis=(1, 2))
        z = int(areas.argmax()) if areas.any() else len(volume.image) // 2
        called += f"[{z}]" if case.slices > 1 else ""
        size = SHARPEST if max(volume.box[2:]) > SHARPEST else None
        axes.imshow(volume.network_view(z, size), extent=(0, 1, 1, 0), aspect="auto", interpolation="bilinear")
        answer = volume.network_target(z, size)
        for classes, colour in outlines:
            inside = np.pad(np.isin(answer, classes).astype(np.float32), 1)
            if inside.any():
                rows, columns = ((np.arange(n) - 0.5) / (n - 2) for n in inside.shape)
                lines = axes.contour(columns, rows, inside, levels=[0.5], colors=[colour], linewidths=1.3)
                lines.set(path_effects=[withStroke(linewidth=2.4, foreground="#000000a0")])
    except BrokenImageError:
        axes.text(0.5, 0.5, "cannot be read", color="#f87171", size=9, ha="center", va="center")
    shown = called if len(called) <= LETTERS else f"…{called[1 - LETTERS :]}"
    axes.text(0.5, 1 + NAME / TILE / 2, shown, color=INK, size=7.5, ha="center", va="center", parse_math=False)
