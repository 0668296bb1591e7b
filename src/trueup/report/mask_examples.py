"""Examples of masks: image, truth, and the answers of source and adapted model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.report.figure_spec import FigureSpec, ImagePanel
from trueup.report.groups import Group, TraceLookup, detail_groups
from trueup.report.traces import Trace
from trueup.report.variants import Record

NEEDS = ("examples", "truth", "answer", "structures", "example_names")


def mask_examples(records: Sequence[Record], trace: TraceLookup) -> list[FigureSpec]:
    """Draw, for each target, the last images of the stream of its first seed, before and after adaptation."""
    found = [group for group in detail_groups(records) if group.metric.name == "dice"]
    return [figure for group in found for target in group.targets for figure in _examples(group, target, trace)]


def example_dice(truth: NDArray[Any], answer: NDArray[Any]) -> float:
    """Return the mean over structures (S, H, W) in the truth or in the answer; NaN if there are none."""
    a, b = truth.astype(bool), answer.astype(bool)
    both, total = (a & b).sum(axis=(1, 2)), a.sum(axis=(1, 2)) + b.sum(axis=(1, 2))
    return float(np.mean(2 * both[total > 0] / total[total > 0])) if total.any() else float("nan")


def _examples(group: Group, target: str, trace: TraceLookup) -> list[FigureSpec]:
    found = group.traced_pair(target, trace, NEEDS, "examples")
    if found is None or group.base is None or group.adapted is None:
        return []
    run, before, after = found
    answers = {group.base.label: before["answer"], group.adapted.label: after["answer"]}
    panels = [p for i in range(len(before["examples"])) for p in _row(before, answers, i)]
    caption = (
        f"The last images of the stream, target {target}, seed {run[0]}: image, truth, and the outlines that "
        f"{group.base.label} and {group.adapted.label} drew. Dice: of this image alone, mean over structures. "
        f"{group.setting}"
    )
    title = f"{group.title}: masks before and after adaptation, on {target}"
    name = f"masks-{group.name}-{group.targets.index(target) + 1}"
    return [FigureSpec(name, title, caption, tuple(panels), 2 + len(answers))]


def _row(trace: Trace, answers: Mapping[str, NDArray[Any]], i: int) -> list[ImagePanel]:
    """Return image, truth and answers side by side."""
    image, names = trace["examples"][i], [str(name) for name in trace["structures"]]
    truth = trace["truth"][i]
    row = [ImagePanel("image", image, {}, str(trace["example_names"][i]))]
    row.append(ImagePanel("truth", image, dict(zip(names, truth, strict=True))))
    for label, masks in answers.items():
        value = example_dice(truth, masks[i])
        note = "Dice undefined" if np.isnan(value) else f"Dice {100 * value:.1f} %"
        row.append(ImagePanel(label, image, dict(zip(names, masks[i], strict=True)), note))
    return row
