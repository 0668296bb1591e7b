"""What changes along a stream: accuracy, Dice, entropy, agreement with the source, each over a moving window."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trueup.report.figure_spec import Axis, Curve, Lines, Plate
from trueup.report.groups import Group, Lookup, closer
from trueup.report.record_rows import Line, Record, Run
from trueup.report.traces import Trace

Numbers = NDArray[np.float64]
Of = Callable[[Group, Line, str, Lookup], dict[Run, Numbers]]

WINDOW = 0.1  # of the stream
POINTS = 40  # along a stream
PANELS = 6  # targets beyond that are averaged
COLUMNS = (1, 1, 2, 3, 2, 3, 3)  # of so many panels, so that few places stay empty
TURNS = 8  # changes of domain that a caption still names


def accuracy_along(records: Sequence[Record], trace: Lookup) -> list[Plate]:
    """How many answers are right, as the stream goes on."""
    said = "Share of right answers"
    return [p for g in closer(records) for p in _plate(g, trace, "accuracy", "accuracy in %", said, _right)]


def dice_along(records: Sequence[Record], trace: Lookup) -> list[Plate]:
    """How well masks overlap with the truth, as the stream goes on."""
    said = "Dice of each image, mean over structures; images where it is undefined are left out"
    return [p for g in closer(records) for p in _plate(g, trace, "dice", "Dice in %", said, _dice)]


def entropy_along(records: Sequence[Record], trace: Lookup) -> list[Plate]:
    """How sure answers are, as the stream goes on."""
    said = (
        "Entropy of the answers; 0 means certain. Falling entropy is what most methods train for, "
        "and is no proof of better answers: compare it with the accuracy"
    )
    return [p for g in closer(records) for p in _plate(g, trace, "entropy", "entropy in nats", said, _entropy)]


def agreement_along(records: Sequence[Record], trace: Lookup) -> list[Plate]:
    """How many answers are those that the frozen source gives to the same image."""
    said = "Share of answers that are those of the frozen source to the same images, right or wrong"
    title = "agreement with the source in %"
    return [p for g in closer(records) for p in _plate(g, trace, "agreement", title, said, _agreement)]


def windows(length: int, points: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where windows begin and end: each a tenth of the stream, the last one at its end."""
    wide = max(1, round(length * WINDOW))
    first = max(1, math.ceil(points * WINDOW))
    ends = np.round(length * np.arange(first, points + 1) / points).astype(np.int64)
    return np.maximum(0, ends - wide), ends


def moving(values: Numbers, points: int) -> Numbers:
    """The mean of each window, without what is NaN; NaN where nothing is left."""
    starts, ends = windows(len(values), points)
    there = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(there, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(there)])
    found = counts[ends] - counts[starts]
    means = (sums[ends] - sums[starts]) / np.maximum(found, 1)
    return np.where(found > 0, means, np.nan)


def mean_and_deviation(rows: Sequence[Numbers]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Over runs, point by point; no deviation of a single run. NaN stands for nothing."""
    table = np.stack(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a point that no run has stays NaN
        mean = np.nanmean(table, axis=0)
        spread = np.nanstd(table, axis=0, ddof=1) if len(rows) > 1 else ()
    return tuple(map(float, mean)), tuple(map(float, spread))


def _right(group: Group, line: Line, target: str, trace: Lookup) -> dict[Run, Numbers]:
    return _each(line, target, trace, lambda t: 100.0 * (t["prediction"] == t["label"]), ("prediction", "label"))


def _dice(group: Group, line: Line, target: str, trace: Lookup) -> dict[Run, Numbers]:
    return _each(line, target, trace, lambda t: 100 * t["dice"].astype(np.float64), ("dice",))


def _entropy(group: Group, line: Line, target: str, trace: Lookup) -> dict[Run, Numbers]:
    return _each(line, target, trace, lambda t: t["entropy"].astype(np.float64), ("entropy",))


def _each(
    line: Line, target: str, trace: Lookup, values: Callable[[Trace], Numbers], needs: Sequence[str]
) -> dict[Run, Numbers]:
    found = {run: trace(record) for run, record in line.runs.get(target, {}).items()}
    return {run: values(t) for run, t in found.items() if t is not None and all(n in t and len(t[n]) for n in needs)}


def _agreement(group: Group, line: Line, target: str, trace: Lookup) -> dict[Run, Numbers]:
    found = {}
    for run, (base, record) in group.pairs(line, target).items() if line.method != "source" else ():
        before, after = trace(base), trace(record)
        if before is None or after is None or "prediction" not in before or "prediction" not in after:
            continue
        if len(before["image"]) and np.array_equal(before["image"], after["image"]):
            found[run] = 100.0 * (before["prediction"] == after["prediction"])
    return found


def _plate(group: Group, trace: Lookup, name: str, unit: str, said: str, of: Of) -> list[Plate]:
    series = {
        target: {line.label: found for line in group.shown if (found := of(group, line, target, trace))}
        for target in group.targets
    }
    series = {target: rows for target, rows in series.items() if rows}
    if not series:
        return []
    together = len(series) > PANELS
    panels = [_mean_panel(series, unit)] if together else [_panel(t, rows, unit) for t, rows in series.items()]
    panels = [panel for panel in panels if panel.curves]
    if not panels:
        return []
    several = any(curve.spread for panel in panels for curve in panel.curves)
    over = "targets of a seed, then seeds that have all targets" if together else "seeds"
    caption = [
        f"{said}. Each point is the mean over the last tenth of the stream up to it.",
        f"Lines: mean over {over}; bands: ± one sample standard deviation over seeds." if several else "",
        *_turns(group, series, trace),
        *_left_out(group),
        group.setting,
        group.seeds,
    ]
    what = unit.partition(" in ")[0]
    title, text = f"{group.title}: {what} along the stream", " ".join(filter(None, caption))
    return [Plate(f"{name}-along-{group.name}", title, text, tuple(panels), COLUMNS[len(panels)])]


def _panel(target: str, rows: Mapping[str, Mapping[Run, Numbers]], unit: str) -> Lines:
    """A target: a curve of each row."""
    lengths = [len(values) for runs in rows.values() for values in runs.values()]
    points = min(POINTS, *lengths)
    ends = windows(round(sum(lengths) / len(lengths)), points)[1]
    curves = []
    for label, runs in rows.items():
        mean, spread = mean_and_deviation([moving(values, points) for values in runs.values()])
        curves.append(Curve(label, tuple(map(float, ends)), mean, spread))
    return Lines(target, Axis("images seen"), Axis(unit), tuple(curves))


def _mean_panel(series: Mapping[str, Mapping[str, Mapping[Run, Numbers]]], unit: str) -> Lines:
    """All targets together: over those of a seed, then over seeds that have them all."""
    points = min(POINTS, *(len(v) for rows in series.values() for runs in rows.values() for v in runs.values()))
    x = tuple(float(100 * end / points) for end in windows(points, points)[1])
    curves = []
    for label in dict.fromkeys(label for rows in series.values() for label in rows):
        per_target = [rows.get(label, {}) for rows in series.values()]
        seeds = [run for run in per_target[0] if all(run in runs for runs in per_target)]
        means = [mean_and_deviation([moving(runs[run], points) for runs in per_target])[0] for run in seeds]
        if means:
            curves.append(Curve(label, x, *mean_and_deviation([np.array(mean) for mean in means])))
    return Lines(f"mean over {len(series)} targets", Axis("% of the stream seen"), Axis(unit), tuple(curves))


def _turns(group: Group, targets: Mapping[str, object], trace: Lookup) -> list[str]:
    """Where streams over several domains enter the next one."""
    said = []
    for target in targets if len(targets) <= PANELS else ():
        records = [record for line in group.lines for record in line.runs.get(target, {}).values()]
        domain = next((t["domain"] for record in records if (t := trace(record)) is not None), np.zeros(0))
        at, names = np.flatnonzero(np.diff(domain)) + 1, target.split("+")
        if 0 < len(at) <= TURNS:
            said.append(f"{target} enters {', '.join(f'{names[int(domain[i])]} after {i} images' for i in at)}.")
    return said


def _left_out(group: Group) -> list[str]:
    """Rows that the plate does not show."""
    count = len(group.lines) - len(group.shown)
    return [f"Rows that only try values of a hyper-parameter ({count}) are left out."] if count else []
