"""Tables of the page: one view per metric, the forms that can be copied, and the list of all runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.report.groups import group_runs
from trueup.report.metrics import METRICS, Metric
from trueup.report.page_markup import boxed, escape, minus_sign, sort_button
from trueup.report.render import LATEX_WIDE, LEGEND, MISSING, has_marks, render_table
from trueup.report.runs import Record, is_finished, json_key, metric_of, target_of
from trueup.report.tables import Cell, Column, Row, Table, group_by_settings, make_tables, shared_settings

Views = Mapping[str, tuple[str, Mapping[str, Table]]]
"""Title, and tables by metric, of each block of the page."""
COPIED = {"markdown": "Markdown", "latex": "LaTeX", "csv": "CSV"}
MARKS = {"": "{}", "best": "<b>{}</b>", "second": "<u>{}</u>"}
SPOKEN = {"": "", "best": '<span class="unseen"> best</span>', "second": '<span class="unseen"> second best</span>'}
SHOWN = ("accuracy", "dice", "seconds")  # metrics of a run
MOST = 50  # numbers of a list or map; longer ones would fill the page
DIGITS = 6  # of a number
DEEP = 3  # levels of a field; deeper values are not split
EDGES = ("average", "all")  # kinds of columns set apart from the targets


@dataclass(frozen=True)
class TableGroup:
    """The tables of one group of runs, by metric, the default one first."""

    title: str
    records: tuple[Record, ...]
    tables: Mapping[str, Table]

    @property
    def default(self) -> Table:
        """The table that is shown until another metric is chosen."""
        return next(iter(self.tables.values()))


def table_groups(records: Sequence[Record]) -> list[TableGroup]:
    """Make the tables of each group with a finished run; failed runs belong to their group."""
    alike = {json_key(shared_settings(some[0])): some for some in group_by_settings(records)}
    found = []
    for group in group_runs(records):
        every = alike[json_key(shared_settings(group.records[0]))]
        metrics = dict.fromkeys([metric_of(every), *measured_metrics(every)])
        tables = {metric.name: make_tables(every, metric=metric.name)[0] for metric in metrics}
        found.append(TableGroup(group.title, tuple(every), tables))
    return found


def measured_metrics(records: Sequence[Record]) -> list[Metric]:
    """Return the metrics that at least one run has, the usual one first."""
    usual = metric_of(records)
    found = [metric for metric in METRICS.values() if any(value_of(record, metric) is not None for record in records)]
    return sorted(found, key=lambda metric: metric != usual)


def value_of(record: Record, metric: Metric) -> float | None:
    """Return the metric of a finished run; None if there is none."""
    value = (record.get(metric.section) or {}).get(metric.name) if is_finished(record) else None
    return float(value) if isinstance(value, int | float) else None


def tables_html(number: str, title: str, tables: Mapping[str, Table]) -> str:
    """Return a block of the page with its default table; the others are among the page's data."""
    buttons = "".join(f'<button type="button" data-form="{form}">{name}</button>' for form, name in COPIED.items())
    metrics = f'data-shown="{next(iter(tables))}" data-metrics="{" ".join(tables)}"'
    return (
        f'<article class="block" data-block="{number}" {metrics}>'
        f'<div class="copy" role="group" aria-label="Copy this table"><span>Copy whole table as</span>{buttons}</div>'
        f'<div class="view">{table_html(title, next(iter(tables.values())))}</div></article>'
    )


def table_html(title: str, table: Table) -> str:
    """Return a table with title, caption and notes."""
    what = table.metric.heading if table.title.endswith("is better") else table.title
    caption = table.caption + (f" {LEGEND}" if has_marks(table) else "")
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    size = " many" if len(table.columns) > LATEX_WIDE else ""
    head = sort_button("method")
    for column in table.columns:
        kind = f' data-target="{escape(column.name)}"' if column.kind == "target" else ""
        first = "ascending" if column.metric.lower else "descending"
        edge = ' class="edge"' if column.kind in EDGES else ""
        head += sort_button(column.name, f' data-first="{first}"{kind}{edge}')
    body = "".join(_row(row, table) for row in table.rows)
    numbers = f'<table class="numbers{size}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return (
        f"<h3>{escape(title)} <small>{escape(what)}</small></h3>{boxed(f'{title}: {what}', numbers)}"
        f'<p class="caption">{escape(caption)}</p>{f"<ul class=notes>{notes}</ul>" if notes else ""}'
    )


def packed_views(made: Views) -> dict[str, Any]:
    """Return all views and copied forms by block and metric, as the page's script looks them up."""
    return {
        number: {
            name: {"view": table_html(title, table), **{form: render_table(table, form) for form in COPIED}}
            for name, table in views.items()
        }
        for number, (title, views) in made.items()
    }


def _row(row: Row, table: Table) -> str:
    cells = []
    for at, (column, cell) in enumerate(zip(table.columns, row.cells, strict=True)):
        room = max((len(column.text(below)[1]) for other in table.rows if (below := other.cells[at])), default=0)
        cells.append(_cell(column, cell, room))
    return f'<tr><th scope="row">{escape(row.label)}</th>{"".join(cells)}</tr>'


def _cell(column: Column, cell: Cell | None, room: int) -> str:
    """Return mean and deviation as printed, aligned at the ±."""
    edge = ' class="edge"' if column.kind in EDGES else ""
    tail = f'<i class="w{min(room, 9)}"></i>' if room else ""
    if cell is None:
        return f'<td{edge}><span aria-label="no number">{MISSING}</span>{tail}</td>'
    mean, deviation = column.text(cell)
    if deviation:
        tail = f'<i class="w{min(room, 9)}"> ± {deviation}</i>'
    value = "" if math.isnan(cell.mean) else f' data-v="{repr(cell.mean).replace("inf", "Infinity")}"'
    return f"<td{edge}{value}>{MARKS[cell.mark].format(minus_sign(mean))}{SPOKEN[cell.mark]}{tail}</td>"


def runs_table(records: Sequence[Record]) -> str:
    """Return the table of all runs."""
    metrics = [METRICS[name] for name in SHOWN if any(value_of(r, METRICS[name]) is not None for r in records)]
    names = ["method", "dataset", "target", "network", "seed", "stream"]
    heads = [(name, "ascending", "seed" if name == "seed" else "word") for name in names]
    heads += [(f"{m.name}{', %' * m.percent}", "ascending" if m.lower else "descending", "number") for m in metrics]
    heads.append(("state", "ascending", "word"))
    head = "".join(sort_button(name, f' data-first="{first}" data-kind="{kind}"') for name, first, kind in heads)
    variants = [variant for group in group_runs(records) for variant in group.variants]
    called = {id(record): variant.label for variant in variants for record in variant.records}
    body = []
    for i, record in enumerate(records):
        settings = record["settings"]
        label = called.get(id(record), str(settings.get("method")))
        words = [settings.get("dataset"), target_of(record), settings.get("network"), settings.get("seed")]
        cells = [f"<td>{escape('' if word is None else word)}</td>" for word in [*words, settings.get("stream")]]
        found = [(metric, value_of(record, metric)) for metric in metrics]
        cells += [f"<td>{'–' if value is None else minus_sign(metric.text(value))}</td>" for metric, value in found]
        state = "<td>done</td>" if is_finished(record) else '<td class="failed">failed</td>'
        name = f'<th scope="row"><button type="button" aria-expanded="false">{escape(label)}</button></th>'
        body.append(f'<tr data-run="{i}">{name}{"".join(cells)}{state}</tr>')
    table = f'<table class="runs" style="--numbers:{len(metrics)}"><thead><tr>{head}</tr></thead>'
    return boxed("All runs", f"{table}<tbody>{''.join(body)}</tbody></table>")


def run_columns(records: Sequence[Record]) -> dict[str, Any]:
    """Return each field's distinct values, and the index of each run's value: -1 for none; None if all are alike."""
    flat = [dict(_fields(record)) for record in records]
    paths = list(dict.fromkeys(path for each in flat for path in each))
    values, which = [], []
    for path in paths:
        keys = [json_key(each[path]) if path in each else "" for each in flat]
        found = {key: each[path] for key, each in zip(keys, flat, strict=True) if key}
        numbers = {key: i for i, key in enumerate(found)}
        row = [numbers.get(key, -1) for key in keys]
        values.append(list(found.values()))
        which.append(row if any(row) else None)
    return {"paths": paths, "values": values, "which": which}


def _fields(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return path and value of each field of a record."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, inner in value.items():
        here = (*path, str(name))
        count = _count_numbers(inner) if path else 0  # a whole section is never left out
        if count > MOST:
            found.append((here, f"{count:,} numbers: see records.jsonl"))
        elif isinstance(inner, Mapping) and inner and len(here) < DEEP:
            found += _fields(inner, here)
        else:
            found.append((here, _short(inner)))
    return found


def _count_numbers(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count_numbers, value.values()))
    return sum(map(_count_numbers, value)) if isinstance(value, list) else isinstance(value, int | float)


def _short(value: Any) -> Any:
    """Round the numbers in a value."""
    if isinstance(value, Mapping):
        return {name: _short(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
