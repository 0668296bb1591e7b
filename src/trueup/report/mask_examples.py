"""Masks to look at: image, truth, and what the source and the adapted model made of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.report.figure_spec import Picture, Plate
from trueup.report.groups import Group, Lookup, closer
from trueup.report.record_rows import Record
from trueup.report.traces import Trace

NEEDS = ("examples", "truth", "answer", "structures", "example_names")


def examples(records: Sequence[Record], trace: Lookup) -> list[Plate]:
    """For each target the last images of the stream of its first seed, before and after adaptation."""
    found = [group for group in closer(records) if group.metric.name == "dice"]
    return [plate for group in found for target in group.targets for plate in _examples(group, target, trace)]


def dice(truth: NDArray[Any], answer: NDArray[Any]) -> float:
    """Mean over structures (S, H, W) that are in the truth or in the answer; NaN if none is."""
    a, b = truth.astype(bool), answer.astype(bool)
    both, total = (a & b).sum(axis=(1, 2)), a.sum(axis=(1, 2)) + b.sum(axis=(1, 2))
    return float(np.mean(2 * both[total > 0] / total[total > 0])) if total.any() else float("nan")


def _examples(group: Group, target: str, trace: Lookup) -> list[Plate]:
    line = group.adapted
    pairs = group.pairs(line, target) if line else {}
    for run, records in sorted(pairs.items(), key=lambda item: str(item[0])):
        before, after = map(trace, records)
        if before is None or after is None or any(name not in t for name in NEEDS for t in (before, after)):
            continue
        if not len(before["examples"]) or not np.array_equal(before["examples"], after["examples"]):
            continue
        assert line is not None
        assert group.base is not None
        answers = {group.base.label: before["answer"], line.label: after["answer"]}
        panels = [p for i in range(len(before["examples"])) for p in _row(before, answers, i)]
        caption = (
            f"The last images of the stream, target {target}, seed {run[0]}: image, truth, and the outlines that "
            f"{group.base.label} and {line.label} drew. Dice: of this image alone, mean over structures. "
            f"{group.setting}"
        )
        title = f"{group.title}: masks before and after adaptation, on {target}"
        name = f"masks-{group.name}-{group.targets.index(target) + 1}"
        return [Plate(name, title, caption, tuple(panels), 2 + len(answers))]
    return []


def _row(trace: Trace, answers: Mapping[str, NDArray[Any]], i: int) -> list[Picture]:
    """An image, its truth, and the answers, side by side."""
    image, names = trace["examples"][i], [str(name) for name in trace["structures"]]
    truth = trace["truth"][i]
    row = [Picture("image", image, {}, str(trace["example_names"][i]))]
    row.append(Picture("truth", image, dict(zip(names, truth, strict=True))))
    for label, masks in answers.items():
        value = dice(truth, masks[i])
        note = "Dice undefined" if np.isnan(value) else f"Dice {100 * value:.1f} %"
        row.append(Picture(label, image, dict(zip(names, masks[i], strict=True)), note))
    return row
