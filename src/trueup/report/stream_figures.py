"""Figures along a stream: accuracy, Dice, entropy and agreement with the source over a moving window."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trueup.report.figure_spec import Axis, Curve, LinePanel
from trueup.report.groups import Figures, Group, Trace, TraceLookup, detail_groups
from trueup.report.runs import Record, RunKey
from trueup.report.variants import Variant

Numbers = NDArray[np.float64]
Series = Mapping[str, Mapping[RunKey, Numbers]]
"""Numbers per image, by label and run."""

WINDOW = 0.1  # of the stream
POINTS = 40  # along a stream
PANELS = 6  # with more targets, one panel shows their mean
COLUMNS = (1, 1, 2, 3, 2, 3, 3)  # by the number of panels, so that few cells stay empty
TURNS = 8  # domain changes that a caption lists, at most


@dataclass(frozen=True)
class StreamQuantity:
    """A number of each image: how to compute it from a trace, and how a figure describes it."""

    name: str
    unit: str
    caption: str
    needs: tuple[str, ...]
    values: Callable[[Trace], Numbers]


ACCURACY = StreamQuantity(
    "accuracy", "accuracy in %", "Share of right answers", ("prediction", "label"),
    lambda t: 100.0 * (t["prediction"] == t["label"]),
)  # fmt: skip
DICE = StreamQuantity(
    "dice", "Dice in %", "Dice of each image, mean over structures; images where it is undefined are left out",
    ("dice",), lambda t: 100 * t["dice"].astype(np.float64),
)  # fmt: skip
ENTROPY = StreamQuantity(
    "entropy", "entropy in nats", "Entropy of the answers; 0 means certain. Falling entropy is what most methods train "
    "for, and is no proof of better answers: compare it with the accuracy",
    ("entropy",), lambda t: t["entropy"].astype(np.float64),
)  # fmt: skip
AGREEMENT = StreamQuantity(
    "agreement", "agreement with the source in %",
    "Share of answers that are those of the frozen source to the same images, right or wrong",
    ("prediction", "base"), lambda t: 100.0 * (t["prediction"] == t["base"]),
)  # fmt: skip


def windows(length: int, points: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return starts and ends of windows, each a tenth of the stream; the last one ends with it."""
    wide = max(1, round(length * WINDOW))
    first = max(1, math.ceil(points * WINDOW))
    ends = np.round(length * np.arange(first, points + 1) / points).astype(np.int64)
    return np.maximum(0, ends - wide), ends


def moving(values: Numbers, points: int) -> Numbers:
    """Return the mean of each window without NaN; NaN if nothing is left."""
    starts, ends = windows(len(values), points)
    there = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(there, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(there)])
    found = counts[ends] - counts[starts]
    means = (sums[ends] - sums[starts]) / np.maximum(found, 1)
    return np.where(found > 0, means, np.nan)


def mean_and_deviation(rows: Sequence[Numbers]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and sample deviation over runs, point by point, without NaN; a single run has no deviation."""
    table = np.stack(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a point that no run has stays NaN
        mean = np.nanmean(table, axis=0)
        spread = np.nanstd(table, axis=0, ddof=1) if len(rows) > 1 else ()
    return tuple(map(float, mean)), tuple(map(float, spread))


def along_stream(records: Sequence[Record], trace: TraceLookup, quantity: StreamQuantity) -> Figures:
    """Draw a quantity along the stream, one figure per group of runs."""
    for group in detail_groups(records):
        series = {
            target: {v.label: found for v in group.shown if (found := _series(group, v, target, trace, quantity))}
            for target in group.targets
        }
        series = {target: rows for target, rows in series.items() if rows}
        unit, together = quantity.unit, len(series) > PANELS
        panels = [_mean_panel(series, unit)] if together else [_panel(t, rows, unit) for t, rows in series.items()]
        panels = [panel for panel in panels if panel.curves]
        if not panels:
            continue
        several = any(curve.spread for panel in panels for curve in panel.curves)
        over = "targets of a seed, then seeds that have all targets" if together else "seeds"
        swept = len(group.variants) - len(group.shown)
        caption = [
            f"{quantity.caption}. Each point is the mean over the last tenth of the stream up to it.",
            f"Lines: mean over {over}; bands: ± one sample standard deviation over seeds." if several else "",
            *_turns(group, series, trace),
            f"Rows that only try values of a hyper-parameter ({swept}) are left out." if swept else "",
            group.setting,
            group.seeds,
        ]
        title = f"{unit.partition(' in ')[0]} along the stream"
        yield group.figure(f"{quantity.name}-along", title, caption, panels, COLUMNS[len(panels)])


def _series(
    group: Group, variant: Variant, target: str, trace: TraceLookup, quantity: StreamQuantity
) -> dict[RunKey, Numbers]:
    """Return the quantity by run, where the trace has the arrays that it needs."""
    found: dict[RunKey, Trace | None] = {run: trace(record) for run, record in variant.runs.get(target, {}).items()}
    if quantity is AGREEMENT:  # add the source's answers to the same images
        pairs = group.pairs(variant, target) if variant.method != "source" else {}
        found, alone = {}, found
        for run, (source, _) in pairs.items():
            before, after = trace(source), alone[run]
            if before and after and "prediction" in before and np.array_equal(before["image"], after["image"]):
                found[run] = {**after, "base": before["prediction"]}
    return {
        run: quantity.values(t)
        for run, t in found.items()
        if t is not None and all(name in t and len(t[name]) for name in quantity.needs)
    }


def _panel(target: str, rows: Series, unit: str) -> LinePanel:
    """Return the panel of a target, with a curve for each variant."""
    lengths = [len(values) for runs in rows.values() for values in runs.values()]
    points = min(POINTS, *lengths)
    ends = windows(round(sum(lengths) / len(lengths)), points)[1]
    curves = []
    for label, runs in rows.items():
        mean, spread = mean_and_deviation([moving(values, points) for values in runs.values()])
        curves.append(Curve(label, tuple(map(float, ends)), mean, spread))
    return LinePanel(target, Axis("images seen"), Axis(unit), tuple(curves))


def _mean_panel(series: Mapping[str, Series], unit: str) -> LinePanel:
    """Return the mean over the targets of a seed, then over seeds that have all targets."""
    points = min(POINTS, *(len(v) for rows in series.values() for runs in rows.values() for v in runs.values()))
    x = tuple(float(100 * end / points) for end in windows(points, points)[1])
    curves = []
    for label in dict.fromkeys(label for rows in series.values() for label in rows):
        per_target = [rows.get(label, {}) for rows in series.values()]
        seeds = [run for run in per_target[0] if all(run in runs for runs in per_target)]
        means = [mean_and_deviation([moving(runs[run], points) for runs in per_target])[0] for run in seeds]
        if means:
            curves.append(Curve(label, x, *mean_and_deviation([np.array(mean) for mean in means])))
    return LinePanel(f"mean over {len(series)} targets", Axis("% of the stream seen"), Axis(unit), tuple(curves))


def _turns(group: Group, targets: Mapping[str, object], trace: TraceLookup) -> list[str]:
    """Say where streams over several domains enter the next one."""
    sentences = []
    for target in targets if len(targets) <= PANELS else ():
        records = [record for variant in group.variants for record in variant.runs.get(target, {}).values()]
        domain = next((t["domain"] for record in records if (t := trace(record)) is not None), np.zeros(0))
        at, names = np.flatnonzero(np.diff(domain)) + 1, target.split("+")
        if 0 < len(at) <= TURNS:
            sentences.append(f"{target} enters {', '.join(f'{names[int(domain[i])]} after {i} images' for i in at)}.")
    return sentences
