"""Records to plates: every figure that they have the numbers for, as pure functions."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trueup.report.feature_space import confusion, embedding, geometry
from trueup.report.figure_spec import Axis, Bars, Curve, Lines, Plate
from trueup.report.groups import Attempts, Group, Lookup, groups, sweeps
from trueup.report.mask_examples import examples
from trueup.report.metrics import METRICS, Metric
from trueup.report.record_rows import Line, Record, key_of, target_of
from trueup.report.stream_figures import accuracy_along, agreement_along, dice_along, entropy_along, mean_and_deviation
from trueup.report.tables import Table, doubts, tables
from trueup.report.traces import Trace

HEAVY = ("examples", "truth", "answer")  # arrays of a trace that are not kept while plates are made
BARS = 48  # side by side in a panel
NAMES = {
    "neighbors": "K, neighbours",
    "per_class": "M, entries kept per class",
    "alignment": "λ, weight of the alignment term",
}
NONE = {"per_class": "all"}
LOG = 20  # times the smallest, from which on an axis goes by factors


def plates(records: Iterable[Record], trace: Lookup) -> list[Plate]:
    """Every plate that the records and traces have what it takes for."""
    records, light = list(records), _keeping(trace)
    kinds = (accuracy_along, domains, entropy_along, agreement_along, confusion, embedding, geometry)
    found = [plate for kind in (*kinds, batch_sizes, sensitivity) for plate in kind(records, light)]
    return [*found, *examples(records, trace), *dice_along(records, light)]


def _keeping(trace: Lookup) -> Lookup:
    """The same traces without pictures, each read once."""
    kept: dict[Any, Trace | None] = {}

    def look(record: Record) -> Trace | None:
        key = record.get("id", id(record))
        if key not in kept:
            found = trace(record)
            kept[key] = None if found is None else {n: values for n, values in found.items() if n not in HEAVY}
        return kept[key]

    return look


def domains(records: Sequence[Record], trace: Lookup) -> list[Plate]:
    """Bars of every row on every target, and on average; of joined targets also on each domain."""
    return [_domains(group) for group in groups(records)]


def _domains(group: Group) -> Plate:
    (table,) = tables(group.records)
    keep = {line.label for line in group.shown}
    ends = [i for i, column in enumerate(table.columns) if column.kind not in ("gain", "seconds")]
    if len(group.targets) == 1:
        ends = ends[:1]  # its average is itself
    wide = max(1, BARS // len(keep))
    count = math.ceil(len(ends) / wide)
    size = math.ceil(len(ends) / count)
    panels = [_bars(table, keep, ends[i : i + size]) for i in range(0, len(ends), size)]
    inside = [panel for target in group.targets if "+" in target for panel in _inside(group, target)]
    panels = [replace(panel, title="whole streams") for panel in panels] + inside if inside else panels
    several = any(curve.spread for panel in panels for curve in panel.curves)
    caption = [
        _first_upper(table.metric.title) + ("; ± is the sample standard deviation over seeds." if several else "."),
        "Average: over the targets of a seed, then over seeds that have all targets." if len(ends) > 1 else "",
        group.setting,
        group.seeds,
    ]
    what = table.metric.title.partition(" in ")[0]
    title = f"{group.title}: {what} by target"
    columns = 1 if len(ends) > 1 or len(panels) == 1 else 2
    return Plate(f"by-target-{group.name}", title, " ".join(filter(None, caption)), tuple(panels), columns)


def _bars(table: Table, keep: set[str], at: Sequence[int]) -> Bars:
    curves = []
    for row in table.rows:
        cells = [row.cells[i] for i in at]
        if row.label in keep and any(cells):
            y = tuple(_scaled(table.metric, cell.mean) if cell else math.nan for cell in cells)
            deviations = [cell.std if cell and cell.std is not None else math.nan for cell in cells]
            spread = tuple(_scaled(table.metric, value) for value in deviations)
            there = any(map(math.isfinite, spread))
            curves.append(Curve(row.label, tuple(map(float, range(len(at)))), y, spread if there else ()))
    x = Axis("target", tuple(table.columns[i].name for i in at))
    return Bars("", x, Axis(_unit(table.metric)), tuple(curves))


def _inside(group: Group, target: str) -> list[Bars]:
    """The domains of a joined target, where records tell them apart."""
    names = target.split("+")
    curves = []
    for line in group.shown:
        runs = [r["results"].get("per_domain") or {} for r in line.runs.get(target, {}).values()]
        rows = [np.array([_number(group.metric, run.get(name)) for name in names]) for run in runs if run]
        if rows:
            curves.append(Curve(line.label, tuple(map(float, range(len(names)))), *mean_and_deviation(rows)))
    x = Axis("domain", tuple(names))
    return [Bars(f"in the stream {target}", x, Axis(_unit(group.metric)), tuple(curves))] if curves else []


def batch_sizes(records: Sequence[Record], trace: Lookup) -> list[Plate]:
    """Accuracy, time and memory against the size of batches, where runs differ in it."""
    return [plate for group in groups(records, apart=("batch",)) for plate in _batch_sizes(group)]


def _batch_sizes(group: Group) -> list[Plate]:
    where = {(target_of(r), r["settings"].get("batch")) for r in group.records}
    sizes = sorted({size for _, size in where if size is not None})
    targets = [target for target in group.targets if all((target, size) in where for size in sizes)]
    if len(sizes) < 2 or not targets:
        return []
    panels = []
    for metric, title, unit in (
        (group.metric, group.metric.title.partition(",")[0], _unit(group.metric)),
        (METRICS["images_per_second"], "time per image", "ms per image"),
        (METRICS["peak_memory_mb"], "peak memory", "MB"),
    ):
        curves = [curve for line in group.shown if (curve := _by_size(line, metric, targets, sizes))]
        if curves:
            numbers = [y for curve in curves for y in curve.y if y > 0]
            log = metric is METRICS["images_per_second"] and bool(numbers) and max(numbers) > LOG * min(numbers)
            x = Axis("images in a batch", log=sizes[-1] > LOG * sizes[0] or len(sizes) > 2)
            panels.append(Lines(title, x, Axis(unit, log=log), tuple(curves)))
    notes = [f"{_first_upper(note)}." for note in doubts(group.records, 0) if note.startswith("environments")]
    caption = [
        f"Mean over target{'s' * (len(targets) > 1)} {', '.join(targets)}, then over seeds; bars: ± one sample "
        "standard deviation over seeds. Time: all of a run by its number of images; memory: peak of the device, or of "
        "the process on a CPU.",
        *notes,
        group.setting,
        group.seeds,
    ]
    title = f"{group.title}: what the size of batches changes"
    return [Plate(f"batch-size-{group.name}", title, " ".join(caption), tuple(panels), 3)] if panels else []


def _by_size(line: Line, metric: Metric, targets: Sequence[str], sizes: Sequence[int]) -> Curve | None:
    per_image = metric.name == "images_per_second"  # its inverse is what one waits for
    found = {}
    for size in sizes:
        rows = line.complete([(target, size) for target in targets], metric).values()
        fit = [row for row in rows if all(row) or not per_image]  # nobody waits for ever
        turned = [[1000 / value if per_image else _scaled(metric, value) for value in row] for row in fit]
        means = [np.array([sum(row) / len(row)]) for row in turned if row]
        if means:
            found[size] = mean_and_deviation(means)
    if len(found) < 2:
        return None
    spread = tuple(deviation[0] if deviation else math.nan for _, deviation in found.values())
    there = any(map(math.isfinite, spread))
    y = tuple(mean[0] for mean, _ in found.values())
    return Curve(line.label, tuple(map(float, found)), y, spread if there else ())


def sensitivity(records: Sequence[Record], trace: Lookup) -> list[Plate]:
    """Accuracy against each hyper-parameter of which there are three values or more, all else alike."""
    return [plate for group in groups(records) for plate in _sensitivity(group)]


def _sensitivity(group: Group) -> list[Plate]:
    found: dict[str, dict[str, Attempts]] = {}
    for sweep in sweeps(group.lines):
        of_method = found.setdefault(sweep.method, {})
        best = of_method.get(sweep.parameter)
        if best is None or _rank(sweep) > _rank(best):
            of_method[sweep.parameter] = sweep
    return [_sensitivity_of(group, method, some) for method, some in found.items()]


def _rank(sweep: Attempts) -> tuple[int, int]:
    """The most values; of equals, the other hyper-parameters as they usually are."""
    return len(sweep.lines), -min(len(line.label) for line in sweep.lines)


def _sensitivity_of(group: Group, method: str, found: dict[str, Attempts]) -> Plate:
    panels = []
    for name, sweep in found.items():
        lines = sorted(sweep.lines, key=lambda line: _place(line.hyper[name]))
        ticks = tuple(_value(name, line.hyper[name]) for line in lines)
        x = tuple(map(float, range(len(lines))))
        curves = [_flat(method, lines, group, x)]
        if group.base is not None:
            one = _flat("source", [group.base], group, (0.0,))
            curves.insert(0, Curve(group.base.label, x, one.y * len(x)))
        panels.append(Lines(NAMES.get(name, name), Axis(name, ticks), Axis(_unit(group.metric)), tuple(curves)))
    rest = {name: value for sweep in found.values() for name, value in sweep.rest.items()}
    fixed = ", ".join(f"{name}={_value(name, rest[name])}" for name in found if name in rest)
    caption = [
        "One hyper-parameter at a time, all others alike" + (f" ({fixed} where not varied)." if fixed else "."),
        "Mean over the targets of a seed, then over seeds that have all targets; bars: ± one sample standard deviation "
        "over seeds. Values are in order, not to scale.",
        "The flat line is the frozen source." if group.base else "",
        group.setting,
        group.seeds,
    ]
    title = f"{group.title}: how much {method} depends on its hyper-parameters"
    text = " ".join(filter(None, caption))
    return Plate(f"sensitivity-{method}-{group.name}", title, text, tuple(panels), min(3, len(panels)))


def _flat(label: str, lines: Sequence[Line], group: Group, x: tuple[float, ...]) -> Curve:
    """The mean of each row over targets and seeds."""
    cells = []
    for line in lines:
        rows = line.complete(group.targets, group.metric).values()
        means = [np.array([_scaled(group.metric, sum(row) / len(row))]) for row in rows]
        cells.append(mean_and_deviation(means) if means else ((math.nan,), ()))
    spread = tuple(deviation[0] if deviation else math.nan for _, deviation in cells)
    there = any(map(math.isfinite, spread))
    return Curve(label, x, tuple(mean[0] for mean, _ in cells), spread if there else ())


def _place(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then words, then no limit."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, key_of(value))


def _value(name: str, value: Any) -> str:
    return NONE.get(name, "none") if value is None else value if isinstance(value, str) else key_of(value)


def _unit(metric: Metric) -> str:
    return metric.title.partition(",")[0]


def _scaled(metric: Metric, value: float) -> float:
    return value * (100 if metric.percent else 1)


def _number(metric: Metric, value: float | None) -> float:
    return math.nan if value is None else _scaled(metric, value)


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
