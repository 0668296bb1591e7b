"""Tables as pure functions of records."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trueup.report.metrics import METRICS, Metric, check_name
from trueup.report.runs import Record, is_finished, json_key, latest_runs, metric_of, run_key, target_of, unique_texts
from trueup.report.variants import Variant, source_variant, variant_notes, variants_of

WITHIN = ("method", "hyper", "select", "guard", "target", "seed")  # settings that may differ inside a table
WITHIN_SOURCE = ("seed", "target")  # and those of the source recipe that may
SWAD = ("converge", "tolerate", "tolerance", "refresh")  # training settings that only SWAD reads


@dataclass(frozen=True)
class Column:
    """A column of numbers; `kind` tells the average from a target that is called `average`."""

    name: str
    metric: Metric
    sign: str = ""
    kind: Literal["target", "average", "gain", "seconds", "all"] = "target"

    def text(self, cell: "Cell") -> tuple[str, str]:
        """Return mean and deviation as printed; the deviation is empty if there is none."""
        return self.metric.text(cell.mean, self.sign), "" if cell.std is None else self.metric.text(cell.std)


@dataclass(frozen=True)
class Cell:
    """A mean in the unit of the records, its sample deviation over n seeds, and its rank in the column."""

    mean: float
    std: float | None
    n: int
    mark: Literal["", "best", "second"] = ""

    @classmethod
    def over(cls, values: Iterable[float]) -> "Cell | None":
        """Return mean and deviation of the values; None if there are none."""
        numbers = list(values)
        if not numbers:
            return None
        mean = mean_of(numbers)
        squares = [(number - mean) * (number - mean) for number in numbers]
        return cls(mean, math.sqrt(sum(squares) / (len(numbers) - 1)) if len(numbers) > 1 else None, len(numbers))


@dataclass(frozen=True)
class Row:
    """A method with its settings; a cell is None where runs are missing."""

    label: str
    method: str
    select: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Table:
    """Numbers of runs that share all settings but method, target and seed."""

    title: str
    caption: str
    metric: Metric
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def make_tables(records: Iterable[Record], *, metric: str | None = None, order: Sequence[str] = ()) -> list[Table]:
    """Make one table per group of runs that share every setting but method, hyper-parameters, target and seed.

    The default metric is Dice for masks, else accuracy. Targets in `order` come first. The last record of an id counts.
    """
    if metric is not None:
        check_name(metric, METRICS, "metric")
    latest = latest_runs(records)
    if not any(map(is_finished, latest)):
        failed = f"; {failures_note(latest)}" if latest else ""
        raise ValueError(f"no finished runs; run `trueup bench` first{failed}")
    groups = group_by_settings(latest)
    return [_table(group, METRICS[metric] if metric else metric_of(group), order) for group in groups]


def group_by_settings(records: Iterable[Record], apart: Collection[str] = ()) -> list[list[Record]]:
    """Group records by the settings that a table's runs share; those named in `apart` may differ, too."""
    groups: dict[str, list[Record]] = {}
    for record in latest_runs(records):
        groups.setdefault(json_key(shared_settings(record, apart)), []).append(record)
    return list(groups.values())


def _table(group: Sequence[Record], metric: Metric, order: Sequence[str]) -> Table:
    # A target where every run failed stays a column; without it, `average` would be over other targets.
    seen = dict.fromkeys(target_of(record) for record in group)
    targets = [*(t for t in dict.fromkeys(order) if t in seen), *(t for t in seen if t not in order)]
    variants, repeated = variants_of([record for record in group if is_finished(record)], target_of)
    base = source_variant(variants)
    columns = [Column(target, metric) for target in targets] + [Column("average", metric, kind="average")]
    columns += [Column("gain", metric, "+", "gain")] if base else []
    columns += [Column("seconds", METRICS["seconds"], kind="seconds")] if metric.name != "seconds" else []
    rows = [_row(variant, base, columns, targets) for variant in variants]
    for at, column in enumerate(columns):
        if column.kind != "seconds":  # differences in time are mostly noise
            mark_best(rows, at, column)
    notes = [failures_note(group), *_gaps(variants, targets, metric), *_remarks(variants, base)]
    notes += [*variant_notes(variants), _undefined(variants, metric), *caveats(group, repeated)]
    title = f"{group[0]['settings'].get('dataset')}: {metric.heading}"
    caption = _caption(group, rows, columns, base)
    return Table(title, caption, metric, tuple(columns), tuple(rows), tuple(filter(None, notes)))


def _row(variant: Variant, base: Variant | None, columns: Sequence[Column], targets: Sequence[str]) -> Row:
    metric = columns[0].metric
    mine = variant.complete(targets, metric)
    cells = [Cell.over(variant.values(target, metric).values()) for target in targets]
    cells.append(Cell.over(mean_of(values) for values in mine.values()))
    if base:
        theirs = base.complete(targets, metric) if base is not variant else {}
        both = [(values, theirs[run]) for run, values in mine.items() if run in theirs]
        cells.append(Cell.over(mean_of([a - b for a, b in zip(*pair, strict=True)]) for pair in both))
    if len(cells) < len(columns):
        seconds = [value for target in targets for value in variant.values(target, METRICS["seconds"]).values()]
        cells.append(Cell(mean_of(seconds), None, len(seconds)) if seconds else None)
    return Row(variant.label, variant.method, variant.select, tuple(cells))


def mean_of(values: Sequence[float]) -> float:
    """Return the mean by a plain sum: fsum and numpy fail on inf - inf."""
    return sum(values) / len(values)


def mark_best(rows: list[Row], at: int, column: Column) -> None:
    """Mark best and second best, compared as printed, so that numbers that look equal rank equal."""
    printed = {}
    for i, row in enumerate(rows):
        cell = row.cells[at]
        if cell is not None and row.select != "oracle" and not math.isnan(cell.mean):
            printed[i] = float(column.text(cell)[0])
    if len(printed) < 2:
        return
    ranks = sorted(set(printed.values()), reverse=not column.metric.lower)
    for i, number in printed.items():
        cells = list(rows[i].cells)
        # Of two rows, the second is the worst, so it is not marked.
        if (cell := cells[at]) is not None and number in ranks[: 2 if len(printed) > 2 else 1]:
            cells[at] = replace(cell, mark="best" if number == ranks[0] else "second")
            rows[i] = replace(rows[i], cells=tuple(cells))


def _caption(group: Sequence[Record], rows: Sequence[Row], columns: Sequence[Column], base: Variant | None) -> str:
    alike = shared_settings(group[0])
    source = alike.pop("source", {})
    if source.get("algorithm") != "swad":
        source = {name: value for name, value in source.items() if name not in SWAD}
    alike.pop("dataset", None)
    runs = [run_key(record) for record in group if is_finished(record)]
    seeds = unique_texts(seed for seed, _ in runs)
    own = unique_texts(seed for _, seed in runs if seed is not None)
    source |= {"same seeds": bool(own)} if own == seeds else {"seeds": ", ".join(own)}
    several = any(cell.n > 1 for row in rows for cell in row.cells[:-1] if cell)
    spread = "± is the sample standard deviation over seeds" if several else "one seed per cell, so no ±"
    words = ["average: over the targets of a seed, then over seeds that have all targets"]
    if base:
        points = ", in points" if columns[0].metric.percent else ""
        words.append(f"gain: difference to {base.label} in the same seed and target, averaged likewise{points}")
    if columns[-1].kind == "seconds":
        words.append("seconds: mean over runs, each of one target and one seed")
    sentences = [
        _in_words({**alike, f"seed{'s' * (len(seeds) > 1)}": ", ".join(seeds)}),
        f"source training: {training}" if (training := _in_words(source)) else "",
        *([spread, "; ".join(words)] if rows else []),
    ]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text)


def _gaps(variants: Sequence[Variant], targets: Sequence[str], metric: Metric) -> list[str]:
    """Say which cells have fewer seeds than others."""
    full = len({run for variant in variants for runs in variant.runs.values() for run in runs})
    gaps = []
    for variant in variants:
        counts: dict[int, list[str]] = {}
        for target in targets:
            counts.setdefault(len(variant.values(target, metric)), []).append(target)
        counts.pop(full, None)
        where = [f"{n} on {'every target' if len(at) == len(targets) else ', '.join(at)}" for n, at in counts.items()]
        gaps += [f"{variant.label} has {' and '.join(where)}"] if where else []
    return [f"fewer than {full} seed{'s' * (full > 1)}: {'; '.join(gaps)}"] if gaps else []


def _remarks(variants: Sequence[Variant], base: Variant | None) -> list[str]:
    selects = {variant.select for variant in variants}
    oracle = "oracle: hyper-parameters chosen with the target's labels; not comparable, so never marked"
    searched = "searched: hyper-parameters chosen on held-out source data"
    alone = "no gain: there is no run of source with these settings"
    remarks = {oracle: "oracle" in selects, searched: "source" in selects, alone: bool(variants) and base is None}
    return [note for note, holds in remarks.items() if holds]


def _undefined(variants: Sequence[Variant], metric: Metric) -> str:
    """Say how many structures have no value of the metric."""
    counts = []
    for variant in variants if metric.undefined else ():
        parts = [part for r in variant.records for part in r["results"].get("per_structure", {}).values()]
        if count := sum(part[metric.undefined] for part in parts):
            counts.append(f"{variant.label} {count} of {sum(part['cases'] for part in parts)}")
    return f"structures without a number, left out: {', '.join(counts)}" if counts else ""


def failures_note(group: Sequence[Record]) -> str:
    """List the failed runs; empty if there are none."""
    failed = [record for record in group if not is_finished(record)]
    return f"failed runs ({len(failed)}): {_names(failed)}" if failed else ""


def caveats(group: Sequence[Record], repeated: int) -> list[str]:
    """Return notes on unreadable images, repeated runs, NaN and differing environments."""
    finished = [record for record in group if is_finished(record)]
    broken = [record for record in finished if record["results"].get("broken")]
    notes = [f"runs with images that could not be read ({len(broken)}): {_names(broken)}"] if broken else []
    notes += [f"runs repeated with the same settings ({repeated}): the last counts"] if repeated else []
    for name, metric in METRICS.items():
        numbers = [(record.get(metric.section) or {}).get(name) for record in finished]
        count = sum(isinstance(number, float) and math.isnan(number) for number in numbers)
        notes += [f"{name} is NaN in {count} run{'s' * (count > 1)}, and so is each mean over them"] * (count > 0)
    known = sum(bool(record.get("environment")) for record in finished)
    notes += [f"some records ({len(finished) - known}) do not say where they ran"] * (0 < known < len(finished))
    return notes + environment_notes(finished)


def environment_notes(records: Sequence[Record]) -> list[str]:
    """Name the parts of the environment in which runs differ."""
    environments = [environment for record in records if (environment := record.get("environment"))]
    notes = []
    for name in dict.fromkeys(name for environment in environments for name in environment):
        values = unique_texts(environment.get(name) for environment in environments)
        notes += [f"environments differ in {name} ({', '.join(values)}); costs may not compare"] * (len(values) > 1)
    return notes


def _names(records: Sequence[Record]) -> str:
    names: dict[str, list[Any]] = {}
    for record in records:
        names.setdefault(f"{record['settings']['method']} on {target_of(record)}", []).append(run_key(record)[0])
    return "; ".join(f"{name} (seed {', '.join(unique_texts(seeds))})" for name, seeds in names.items())


def shared_settings(record: Record, apart: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that all runs of a table share, without those in `apart`."""
    settings = {name: value for name, value in record["settings"].items() if name not in WITHIN}
    source = settings.get("source") or {}
    if isinstance(code := settings.get("code"), Mapping):  # the code of a method belongs to its row
        settings["code"] = {name: value for name, value in code.items() if name != "method"}
    settings["source"] = {name: value for name, value in source.items() if name not in WITHIN_SOURCE}
    return {name: value for name, value in settings.items() if name not in apart}


def _in_words(knobs: Mapping[str, Any]) -> str:
    """Return settings as text, without those that are off."""
    words = []
    for name, value in knobs.items():
        text = f"({_in_words(value)})" if isinstance(value, Mapping) else "" if value is True else str(value)
        off = value is None or value is False or text in ("()", "[]") or value == ""
        words += [] if off else [f"{name} {text}".rstrip()]
    return ", ".join(words)
