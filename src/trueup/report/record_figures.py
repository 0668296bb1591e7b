"""All figures of a report, as pure functions of records and traces."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trueup.report.feature_space import confusion, embedding, geometry, mask_examples
from trueup.report.figure_spec import Axis, BarPanel, Curve, FigureSpec, LinePanel
from trueup.report.groups import Figures, Group, HyperSweep, Trace, TraceLookup, group_runs, hyper_sweeps
from trueup.report.metrics import METRICS, Metric
from trueup.report.page_markup import upper_first
from trueup.report.runs import Record, json_key, target_of
from trueup.report.stream_figures import ACCURACY, AGREEMENT, DICE, ENTROPY, Numbers, along_stream, mean_and_deviation
from trueup.report.tables import Table, environment_notes, make_tables, mean_of
from trueup.report.variants import Variant

HEAVY = ("examples", "truth", "answer")  # arrays of a trace that are not kept in memory
BARS = 48  # side by side in a panel
NAMES = {
    "neighbors": "K, neighbours",
    "per_class": "M, entries kept per class",
    "alignment": "λ, weight of the alignment term",
}
NONE = {"per_class": "all"}
LOG = 20  # ratio of largest to smallest value from which an axis is logarithmic


def make_figures(records: Iterable[Record], trace: TraceLookup) -> list[FigureSpec]:
    """Make every figure that the records and traces have the data for."""
    records, light = list(records), _cached(trace)
    return [
        *along_stream(records, light, ACCURACY),
        *target_bars(records),
        *along_stream(records, light, ENTROPY),
        *along_stream(records, light, AGREEMENT),
        *confusion(records, light),
        *embedding(records, light),
        *geometry(records),
        *batch_sizes(records),
        *sensitivity(records),
        *mask_examples(records, trace),
        *along_stream(records, light, DICE),
    ]


def _cached(trace: TraceLookup) -> TraceLookup:
    """Return a lookup that reads each trace once, and keeps it without images."""
    kept: dict[Any, Trace | None] = {}

    def cached(record: Record) -> Trace | None:
        key = record.get("id", id(record))
        if key not in kept:
            found = trace(record)
            kept[key] = None if found is None else {n: values for n, values in found.items() if n not in HEAVY}
        return kept[key]

    return cached


def target_bars(records: Sequence[Record]) -> Figures:
    """Draw bars by target and on average, and for joined targets by domain."""
    for group in group_runs(records):
        (table,) = make_tables(group.records)
        keep = {variant.label for variant in group.shown}
        ends = [i for i, column in enumerate(table.columns) if column.kind not in ("gain", "seconds")]
        if len(group.targets) == 1:
            ends = ends[:1]  # the average of one target is the target
        count = math.ceil(len(ends) / max(1, BARS // len(keep)))
        size = math.ceil(len(ends) / count)
        panels = [_bars(table, keep, ends[i : i + size]) for i in range(0, len(ends), size)]
        inside = [panel for target in group.targets if "+" in target for panel in _domain_bars(group, target)]
        panels = [replace(panel, title="whole streams") for panel in panels] + inside if inside else panels
        several = any(curve.spread for panel in panels for curve in panel.curves)
        caption = [
            upper_first(table.metric.title) + ("; ± is the sample standard deviation over seeds." if several else "."),
            "Average: over the targets of a seed, then over seeds that have all targets." if len(ends) > 1 else "",
            group.setting,
            group.seeds,
        ]
        title = f"{table.metric.title.partition(' in ')[0]} by target"
        columns = 1 if len(ends) > 1 or len(panels) == 1 else 2
        yield group.figure("by-target", title, caption, panels, columns)


def _bars(table: Table, keep: set[str], at: Sequence[int]) -> BarPanel:
    curves = []
    for row in table.rows:
        cells = [row.cells[i] for i in at]
        if row.label in keep and any(cells):
            y = [table.metric.scaled(cell.mean) if cell else math.nan for cell in cells]
            spread = [table.metric.scaled(c.std) if c and c.std is not None else math.nan for c in cells]
            curves.append(_curve(row.label, range(len(at)), y, spread))
    x = Axis("target", tuple(table.columns[i].name for i in at))
    return BarPanel("", x, Axis(table.metric.unit), tuple(curves))


def _curve(label: str, x: Iterable[float], y: Iterable[float], spread: Sequence[float]) -> Curve:
    """Return a curve, without spread if no point has one."""
    there = any(map(math.isfinite, spread))
    return Curve(label, tuple(map(float, x)), tuple(y), tuple(spread) if there else ())


def _domain_bars(group: Group, target: str) -> list[BarPanel]:
    """Return bars by domain of a joined target, if records have numbers by domain."""
    names = target.split("+")
    curves = []
    for variant in group.shown:
        runs = [r["results"].get("per_domain") or {} for r in variant.runs.get(target, {}).values()]
        shares = [[run.get(name) for name in names] for run in runs if run]
        rows = [np.array([math.nan if v is None else group.metric.scaled(v) for v in share]) for share in shares]
        if rows:
            curves.append(Curve(variant.label, tuple(map(float, range(len(names)))), *mean_and_deviation(rows)))
    x = Axis("domain", tuple(names))
    return [BarPanel(f"in the stream {target}", x, Axis(group.metric.unit), tuple(curves))] if curves else []


def batch_sizes(records: Sequence[Record]) -> Figures:
    """Draw accuracy, time and memory against batch size, where runs differ in it."""
    for group in group_runs(records, apart=("batch",)):
        where = {(target_of(r), r["settings"].get("batch")) for r in group.records}
        sizes = sorted({size for _, size in where if size is not None})
        targets = [target for target in group.targets if all((target, size) in where for size in sizes)]
        panels = _batch_panels(group, targets, sizes) if len(sizes) > 1 and targets else []
        if not panels:
            continue
        caption = [
            f"Mean over target{'s' * (len(targets) > 1)} {', '.join(targets)}, then over seeds; bars: ± one sample "
            "standard deviation over seeds. Time: all of a run by its number of images; memory: peak of the device, or "
            "of the process on a CPU.",
            *(f"{upper_first(note)}." for note in environment_notes(group.records)),
            group.setting,
            group.seeds,
        ]
        yield group.figure("batch-size", "effect of the batch size", caption, panels, 3)


def _batch_panels(group: Group, targets: Sequence[str], sizes: Sequence[int]) -> list[LinePanel]:
    x = Axis("images in a batch", log=sizes[-1] > LOG * sizes[0] or len(sizes) > 2)
    panels = []
    for metric, title, unit in (
        (group.metric, group.metric.unit, group.metric.unit),
        (METRICS["images_per_second"], "time per image", "ms per image"),
        (METRICS["peak_memory_mb"], "peak memory", "MB"),
    ):
        curves = [curve for variant in group.shown if (curve := _by_size(variant, metric, targets, sizes))]
        if curves:
            numbers = [y for curve in curves for y in curve.y if y > 0]
            log = metric is METRICS["images_per_second"] and bool(numbers) and max(numbers) > LOG * min(numbers)
            panels.append(LinePanel(title, x, Axis(unit, log=log), tuple(curves)))
    return panels


def _by_size(variant: Variant, metric: Metric, targets: Sequence[str], sizes: Sequence[int]) -> Curve | None:
    per_image = metric.name == "images_per_second"  # shown as time per image, its inverse
    found = {}
    for size in sizes:
        rows = variant.complete([(target, size) for target in targets], metric).values()
        fit = [row for row in rows if all(row) or not per_image]  # a speed of 0 has no inverse
        turned = [[1000 / value if per_image else metric.scaled(value) for value in row] for row in fit]
        if means := [np.array([mean_of(row)]) for row in turned if row]:
            found[size] = means
    return _mean_curve(variant.label, found, list(found.values())) if len(found) > 1 else None


def _mean_curve(label: str, x: Iterable[float], points: Sequence[Sequence[Numbers]]) -> Curve:
    """Return mean and deviation over the runs of each point; NaN for a point without runs."""
    found = [mean_and_deviation(runs) if runs else ((math.nan,), ()) for runs in points]
    return _curve(label, x, [mean[0] for mean, _ in found], [std[0] if std else math.nan for _, std in found])


def sensitivity(records: Sequence[Record]) -> Figures:
    """Draw the metric against each swept hyper-parameter, with all others fixed."""
    for group in group_runs(records):
        found: dict[str, dict[str, HyperSweep]] = {}
        for sweep in hyper_sweeps(group.variants):
            of_method = found.setdefault(sweep.method, {})
            best = of_method.setdefault(sweep.parameter, sweep)
            of_method[sweep.parameter] = max(best, sweep, key=_rank)
        yield from (_sensitivity_of(group, method, some) for method, some in found.items())


def _rank(sweep: HyperSweep) -> tuple[int, int]:
    """Prefer the most values, then the most common other hyper-parameters."""
    return len(sweep.variants), -min(len(variant.label) for variant in sweep.variants)


def _sensitivity_of(group: Group, method: str, found: dict[str, HyperSweep]) -> FigureSpec:
    panels = []
    for name, sweep in found.items():
        variants = sorted(sweep.variants, key=lambda variant: _sort_key(variant.hyper[name]))
        ticks = tuple(_value(name, variant.hyper[name]) for variant in variants)
        curves = [_mean_curve(method, range(len(ticks)), [_means(variant, group) for variant in variants])]
        if group.base is not None:
            flat = _mean_curve("source", (0.0,), [_means(group.base, group)])
            curves.insert(0, Curve(group.base.label, curves[0].x, flat.y * len(ticks)))
        panels.append(LinePanel(NAMES.get(name, name), Axis(name, ticks), Axis(group.metric.unit), tuple(curves)))
    rest = {name: value for sweep in found.values() for name, value in sweep.rest.items()}
    fixed = ", ".join(f"{name}={_value(name, rest[name])}" for name in found if name in rest)
    caption = [
        "One hyper-parameter at a time, all others fixed" + (f" ({fixed} where not varied)." if fixed else "."),
        "Mean over the targets of a seed, then over seeds that have all targets; bars: ± one sample standard deviation "
        "over seeds. Values are in order, not to scale.",
        "The flat line is the frozen source." if group.base else "",
        group.setting,
        group.seeds,
    ]
    title = f"sensitivity of {method} to its hyper-parameters"
    return group.figure(f"sensitivity-{method}", title, caption, panels, min(3, len(panels)))


def _means(variant: Variant, group: Group) -> list[Numbers]:
    """Return the mean over targets of each seed."""
    rows = variant.complete(group.targets, group.metric).values()
    return [np.array([group.metric.scaled(mean_of(row))]) for row in rows]


def _sort_key(value: Any) -> tuple[int, float, str]:
    """Sort numbers by size, then words, then None."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, json_key(value))


def _value(name: str, value: Any) -> str:
    return NONE.get(name, "none") if value is None else value if isinstance(value, str) else json_key(value)
