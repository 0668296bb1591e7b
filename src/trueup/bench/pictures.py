"""Masks side by side: images with the outlines that each method draws, beside the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trueup.bench.judges import Indices, regions
from trueup.bench.overlap import dice
from trueup.bench.protocol import Progress, Stage
from trueup.core.method import Method
from trueup.data.domains import Image
from trueup.data.slices import SliceDomain

COLOURS = ("#00e5ff", "#ffe600", "#ff4dd2", "#76ff03")  # of outlines; seen on red, grey and black alike
Regions = Mapping[str, NDArray[np.bool_]]


@dataclass(frozen=True)
class Example:
    """One image, what is true of it, and what each method says."""

    name: str
    image: Image
    truth: Regions
    answers: Mapping[str, Regions]


def examples(
    stage: Stage, methods: Sequence[Method], count: int, progress: Progress = lambda done, of: None
) -> list[Example]:
    """The last images of a stream, as methods answer to them after all that came before."""
    kept: dict[str, list[tuple[int, Tensor]]] = {}
    for done, method in enumerate(methods):
        progress(done, len(methods))
        last: list[tuple[int, Tensor]] = []

        def take(logits: Tensor, indices: Indices, last: list[tuple[int, Tensor]] = last) -> None:
            last.extend(zip(indices.tolist(), logits, strict=True))
            del last[:-count]

        stage.online(stage.adapter(method), stage.loader.batches(stage.stream), lambda done, of: None, take)
        kept[method.info.name] = last
    progress(len(methods), len(methods))
    return [_example(stage, i, kept, row) for row, (i, _) in enumerate(next(iter(kept.values())))]


def _example(stage: Stage, index: int, kept: Mapping[str, list[tuple[int, Tensor]]], row: int) -> Example:
    domain, i = stage.loader.place.find(index)
    assert isinstance(domain, SliceDomain)
    number, z = domain.place(i)
    volume = domain.volume(number)
    assert volume.mask is not None
    truth = {name: np.isin(volume.mask[z], part) for name, part in stage.structures.items()}
    said = {
        name: regions(answers[row][1], volume, stage.structures, multilabel=stage.multilabel)
        for name, answers in kept.items()
    }
    image = volume.image[z]
    return Example(domain.label_of(i), np.repeat(image, 4 - image.shape[2], axis=2)[..., :3], truth, said)


def draw(groups: Mapping[str, Sequence[Example]], path: Path) -> None:
    """Rows of examples under a title for each group; the figure under each answer is its mean Dice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [(title, example) for title, part in groups.items() for example in part]
    columns = ["image", "truth", *rows[0][1].answers]
    figure: Any = Figure(figsize=(1.5 * len(columns), 1.6 * len(rows) + 0.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.01, hspace=0.0, wspace=0.0)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for number, (line, (title, example)) in enumerate(zip(axes, rows, strict=True)):
        first = next(e for t, e in rows if t == title) is example
        for axis, column in zip(line, columns, strict=True):
            found = example.truth if column == "truth" else example.answers.get(column)
            _panel(axis, example, found, scored=column not in ("image", "truth"))
            if number == 0:
                axis.set_title(column, fontsize=10)
        line[0].set_ylabel(title if first else "", fontsize=10)
    handles = [
        figure.axes[0].plot([], [], color=c, label=s)[0] for s, c in zip(rows[0][1].truth, COLOURS, strict=False)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _panel(axis: Any, example: Example, found: Regions | None, *, scored: bool) -> None:
    axis.imshow(example.image, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])
    for name, colour in zip(example.truth, COLOURS, strict=False):
        if found is not None and found[name].any() and not found[name].all():
            axis.contour(found[name], levels=[0.5], colors=[colour], linewidths=1.2)
    if scored and found is not None:
        each = [dice(found[name], example.truth[name]) for name in example.truth]
        there = [value for value in each if not np.isnan(value)]
        axis.set_xlabel(f"{100 * np.mean(there):.0f}" if there else "–", fontsize=8, labelpad=2)
