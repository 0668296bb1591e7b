"""Tables as pure functions of records: what is averaged with what, and what is compared to what."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trueup.report.metrics import METRICS, Metric, known
from trueup.report.record_rows import Line, Record, base_of, done, key_of, lines_of, run_of, target_of, variants

WITHIN = ("method", "hyper", "select", "guard", "target", "seed")  # settings that may differ inside a table
WITHIN_SOURCE = ("seed", "target")  # and those of the source recipe
SWAD = ("converge", "tolerate", "tolerance", "refresh")  # settings of training that only SWAD reads


@dataclass(frozen=True)
class Column:
    """What it is called, what its numbers are, and what they are of: a target may be called `average`, too."""

    name: str
    metric: Metric
    sign: str = ""
    kind: Literal["target", "average", "gain", "seconds", "all"] = "target"

    def text(self, cell: "Cell") -> tuple[str, str]:
        """Mean and deviation as printed; no deviation is an empty string."""
        return self.metric.text(cell.mean, self.sign), "" if cell.std is None else self.metric.text(cell.std)


@dataclass(frozen=True)
class Cell:
    """A mean in the unit of the records, the sample deviation over n seeds, and whether it is the column's best."""

    mean: float
    std: float | None
    n: int
    mark: Literal["", "best", "second"] = ""


@dataclass(frozen=True)
class Row:
    """A method with its settings; a cell is None where runs are missing."""

    label: str
    method: str
    select: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Table:
    """Runs that differ in nothing but method, target and seed."""

    title: str
    caption: str
    metric: Metric
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def tables(records: Iterable[Record], *, metric: str | None = None, order: Sequence[str] = ()) -> list[Table]:
    """One table per group of runs that share every setting but method, hyper-parameters, target and seed.

    `metric` is accuracy if left out, or Dice where there are masks. `order` puts these targets first; the others follow
    as they appear. Of records with one id the last counts.
    """
    if metric is not None:
        known(metric, METRICS, "metric")
    latest: dict[Any, Record] = {record.get("id", f"#{i}"): record for i, record in enumerate(records)}
    if not any(map(done, latest.values())):
        failed = f"; {_failures(list(latest.values()))}" if latest else ""
        raise ValueError(f"no finished runs; run `trueup bench` first{failed}")
    groups: dict[str, list[Record]] = {}
    for record in latest.values():
        groups.setdefault(key_of(shared(record)), []).append(record)
    return [_table(group, METRICS[metric or _usual_metric(group)], order) for group in groups.values()]


def _usual_metric(group: Iterable[Record]) -> str:
    return "dice" if any("dice" in (record.get("results") or {}) for record in group) else "accuracy"


def _table(group: Sequence[Record], metric: Metric, order: Sequence[str]) -> Table:
    # A target where every run failed stays a column: without it `average` would mean something else.
    seen = dict.fromkeys(target_of(record) for record in group)
    targets = [*(t for t in dict.fromkeys(order) if t in seen), *(t for t in seen if t not in order)]
    lines, repeated = lines_of([record for record in group if done(record)], target_of)
    base = base_of(lines)
    columns = [Column(target, metric) for target in targets] + [Column("average", metric, kind="average")]
    columns += [Column("gain", metric, "+", "gain")] if base else []
    columns += [Column("seconds", METRICS["seconds"], kind="seconds")] if metric.name != "seconds" else []
    rows = [_row(line, base, columns, targets) for line in lines]
    for at, column in enumerate(columns):
        if column.kind != "seconds":  # beside another metric noise in time makes no winner
            mark(rows, at, column)
    notes = [_failures(group), *_gaps(lines, targets, metric), *_remarks(lines, base), *variants(lines)]
    notes += [_undefined(lines, metric), *doubts(group, repeated)]
    return Table(
        title=f"{shared(group[0]).get('dataset')}: {metric.title}, {'lower' if metric.lower else 'higher'} is better",
        caption=_caption(group, rows, columns, base),
        metric=metric,
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(note for note in notes if note),
    )


def _row(line: Line, base: Line | None, columns: Sequence[Column], targets: Sequence[str]) -> Row:
    metric = columns[0].metric
    mine = line.complete(targets, metric)
    cells = [_cell(line.values(target, metric).values()) for target in targets]
    cells.append(_cell(_mean(values) for values in mine.values()))
    if base:
        theirs = base.complete(targets, metric) if base is not line else {}
        both = [(values, theirs[run]) for run, values in mine.items() if run in theirs]
        cells.append(_cell(_mean([a - b for a, b in zip(*pair, strict=True)]) for pair in both))
    if len(cells) < len(columns):
        seconds = [value for target in targets for value in line.values(target, METRICS["seconds"]).values()]
        cells.append(Cell(_mean(seconds), None, len(seconds)) if seconds else None)
    return Row(line.label, line.method, line.select, tuple(cells))


def _cell(values: Iterable[float]) -> Cell | None:
    numbers = list(values)
    if not numbers:
        return None
    mean = _mean(numbers)
    squares = [(number - mean) * (number - mean) for number in numbers]
    return Cell(mean, math.sqrt(sum(squares) / (len(numbers) - 1)) if len(numbers) > 1 else None, len(numbers))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # fsum and numpy stumble over inf - inf


def mark(rows: list[Row], at: int, column: Column) -> None:
    """Best and second best, compared as printed: of two equal numbers on paper neither is the better one."""
    printed = {}
    for i, row in enumerate(rows):
        cell = row.cells[at]
        if cell is not None and row.select != "oracle" and not math.isnan(cell.mean):
            printed[i] = float(column.text(cell)[0])
    if len(printed) < 2:
        return  # nothing to be better than
    ranks = sorted(set(printed.values()), reverse=not column.metric.lower)
    for i, number in printed.items():
        cells = list(rows[i].cells)
        # The second of two is the last.
        if (cell := cells[at]) is not None and number in ranks[: 2 if len(printed) > 2 else 1]:
            cells[at] = replace(cell, mark="best" if number == ranks[0] else "second")
            rows[i] = replace(rows[i], cells=tuple(cells))


def _caption(group: Sequence[Record], rows: Sequence[Row], columns: Sequence[Column], base: Line | None) -> str:
    alike = shared(group[0])
    source = alike.pop("source", {})
    if source.get("algorithm") != "swad":
        source = {name: value for name, value in source.items() if name not in SWAD}
    alike.pop("dataset", None)
    runs = [run_of(record) for record in group if done(record)]
    seeds = in_order(seed for seed, _ in runs)
    own = in_order(seed for _, seed in runs if seed is not None)
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
        _say({**alike, f"seed{'s' * (len(seeds) > 1)}": ", ".join(seeds)}),
        f"source training: {said}" if (said := _say(source)) else "",
        *([spread, "; ".join(words)] if rows else []),
    ]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text)


def _gaps(lines: Sequence[Line], targets: Sequence[str], metric: Metric) -> list[str]:
    """Which cells rest on fewer seeds than others."""
    full = len({run for line in lines for runs in line.runs.values() for run in runs})
    gaps = []
    for line in lines:
        counts: dict[int, list[str]] = {}
        for target in targets:
            counts.setdefault(len(line.values(target, metric)), []).append(target)
        counts.pop(full, None)
        where = [f"{n} on {'every target' if len(at) == len(targets) else ', '.join(at)}" for n, at in counts.items()]
        gaps += [f"{line.label} has {' and '.join(where)}"] if where else []
    return [f"fewer than {full} seed{'s' * (full > 1)}: {'; '.join(gaps)}"] if gaps else []


def _remarks(lines: Sequence[Line], base: Line | None) -> list[str]:
    selects = {line.select for line in lines}
    oracle = "oracle: hyper-parameters chosen with the target's labels; not comparable, so never marked"
    searched = "searched: hyper-parameters chosen on held-out source data"
    alone = "no gain: there is no run of source with these settings"
    said = {oracle: "oracle" in selects, searched: "source" in selects, alone: bool(lines) and base is None}
    return [note for note, holds in said.items() if holds]


def _undefined(lines: Sequence[Line], metric: Metric) -> str:
    """How many structures of cases a row has no number of."""
    said = []
    for line in lines if metric.undefined else ():
        results = [record["results"] for runs in line.runs.values() for record in runs.values()]
        parts = [part for each in results for part in each.get("per_structure", {}).values()]
        if count := sum(part[metric.undefined] for part in parts):
            said.append(f"{line.label} {count} of {sum(part['cases'] for part in parts)}")
    return f"structures without a number, left out: {', '.join(said)}" if said else ""


def _failures(group: Sequence[Record]) -> str:
    failed = [record for record in group if not done(record)]
    return f"failed runs ({len(failed)}): {_names(failed)}" if failed else ""


def doubts(group: Sequence[Record], repeated: int) -> list[str]:
    """What a careful reader would want to know before trusting the numbers."""
    finished = [record for record in group if done(record)]
    broken = [record for record in finished if record["results"].get("broken")]
    notes = [f"runs with images that could not be read ({len(broken)}): {_names(broken)}"] if broken else []
    notes += [f"runs repeated with the same settings ({repeated}): the last counts"] if repeated else []
    for name, metric in METRICS.items():
        numbers = [(record.get(metric.section) or {}).get(name) for record in finished]
        count = sum(isinstance(number, float) and math.isnan(number) for number in numbers)
        notes += [f"{name} is NaN in {count} run{'s' * (count > 1)}, and so is each mean over them"] * (count > 0)
    environments = [environment for record in finished if (environment := record.get("environment"))]
    if 0 < len(environments) < len(finished):
        notes.append(f"some records ({len(finished) - len(environments)}) do not say where they ran")
    for name in dict.fromkeys(name for environment in environments for name in environment):
        values = in_order(environment.get(name) for environment in environments)
        notes += [f"environments differ in {name} ({', '.join(values)}); costs may not compare"] * (len(values) > 1)
    return notes


def _names(records: Sequence[Record]) -> str:
    names: dict[str, list[Any]] = {}
    for record in records:
        names.setdefault(f"{record['settings']['method']} on {target_of(record)}", []).append(run_of(record)[0])
    return "; ".join(f"{name} (seed {', '.join(in_order(seeds))})" for name, seeds in names.items())


def shared(record: Record) -> dict[str, Any]:
    """The settings that all runs of a table have in common."""
    settings = {name: value for name, value in record["settings"].items() if name not in WITHIN}
    source = settings.get("source") or {}
    if isinstance(code := settings.get("code"), Mapping):  # that of a method is its row's
        settings["code"] = {name: value for name, value in code.items() if name != "method"}
    return {**settings, "source": {name: value for name, value in source.items() if name not in WITHIN_SOURCE}}


def in_order(values: Iterable[Any]) -> list[str]:
    """Each value once, as text; numbers by size."""
    return sorted({str(value) for value in values}, key=lambda text: (len(text), text))


def _say(knobs: Mapping[str, Any]) -> str:
    """Knobs in words; one that is off says nothing."""
    words = []
    for name, value in knobs.items():
        said = f"({_say(value)})" if isinstance(value, Mapping) else "" if value is True else str(value)
        off = value is None or value is False or said in ("()", "[]") or value == ""
        words += [] if off else [f"{name} {said}".rstrip()]
    return ", ".join(words)
