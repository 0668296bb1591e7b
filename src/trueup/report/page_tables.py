"""Tables of a page: the cells of `tables`, one view for each metric, and the forms that can be copied."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.report.groups import groups
from trueup.report.metrics import METRICS, Metric
from trueup.report.page_markup import signed, text
from trueup.report.record_rows import Record, done, key_of
from trueup.report.render import LATEX_WIDE, LEGEND, MISSING, render
from trueup.report.tables import Cell, Column, Row, Table, shared, tables

COPIED = {"markdown": "Markdown", "latex": "LaTeX", "csv": "CSV"}
MARKS = {"": "{}", "best": "<b>{}</b>", "second": "<u>{}</u>"}
SAID = {"": "", "best": '<span class="unseen"> best</span>', "second": '<span class="unseen"> second best</span>'}
EDGES = ("average", "all")  # kinds of columns that stand apart from the targets


@dataclass(frozen=True)
class Block:
    """The tables of one group of runs, by metric; the usual one is first."""

    title: str
    records: tuple[Record, ...]
    tables: Mapping[str, Table]

    @property
    def usual(self) -> Table:
        """The table that is shown until another metric is chosen."""
        return next(iter(self.tables.values()))


def latest(records: Sequence[Record]) -> list[Record]:
    """Of records with one id the last."""
    return list({record.get("id", f"#{i}"): record for i, record in enumerate(records)}.values())


def blocks(records: Sequence[Record]) -> list[Block]:
    """A block for each group with a finished run, the failed ones of the group among them."""
    alike: dict[str, list[Record]] = {}
    for record in latest(records):
        alike.setdefault(key_of(shared(record)), []).append(record)
    made = []
    for group in groups(records):
        every = alike[key_of(shared(group.records[0]))]
        (usual,) = tables(every)
        others = [metric.name for metric in measured(every) if metric.name != usual.metric.name]
        views = {usual.metric.name: usual} | {name: tables(every, metric=name)[0] for name in others}
        made.append(Block(group.title, tuple(every), views))
    return made


def measured(records: Sequence[Record]) -> list[Metric]:
    """The metrics that some run has a number of."""
    return [metric for metric in METRICS.values() if any(value_of(record, metric) is not None for record in records)]


def value_of(record: Record, metric: Metric) -> float | None:
    """What a run has of a metric."""
    value = (record.get(metric.section) or {}).get(metric.name) if done(record) else None
    return float(value) if isinstance(value, int | float) else None


def block(number: str, title: str, table: Table, *, metrics: Sequence[str]) -> str:
    """A block of the page, with its usual view in it; the others are among its data."""
    buttons = "".join(f'<button type="button" data-form="{form}">{name}</button>' for form, name in COPIED.items())
    return (
        f'<article class="block" data-block="{number}" data-shown="{metrics[0]}" data-metrics="{" ".join(metrics)}">'
        f'<div class="copy" role="group" aria-label="Copy this table"><span>Copy whole table as</span>{buttons}</div>'
        f'<div class="view">{view(title, table)}</div></article>'
    )


def view(title: str, table: Table) -> str:
    """A table under its title, with its caption and notes."""
    better = f"{table.metric.title}, {'lower' if table.metric.lower else 'higher'} is better"
    what = better if table.title.endswith("is better") else table.title
    marked = any(cell.mark for row in table.rows for cell in row.cells if cell)
    caption = table.caption + (f" {LEGEND}" if marked else "")
    notes = "".join(f"<li>{text(note)}</li>" for note in table.notes)
    size = " many" if len(table.columns) > LATEX_WIDE else ""
    head = "".join(_head(column) for column in table.columns)
    body = "".join(_row(row, table) for row in table.rows)
    return (
        f"<h3>{text(title)} <small>{text(what)}</small></h3>"
        f'<div class="box" tabindex="0" role="region" aria-label="{text(f"{title}: {what}")}">'
        f'<table class="numbers{size}">'
        f'<thead><tr><th scope="col" aria-sort="none"><button type="button">method</button></th>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="caption">{text(caption)}</p>'
        f"{f'<ul class=notes>{notes}</ul>' if notes else ''}"
    )


def forms(table: Table) -> dict[str, str]:
    """What the buttons copy."""
    return {form: render(table, form) for form in COPIED}


def packed(made: Mapping[str, tuple[str, Mapping[str, Table]]]) -> dict[str, Any]:
    """All views and forms by block and metric, as the page's script looks them up."""
    return {
        number: {name: {"view": view(title, table), **forms(table)} for name, table in views.items()}
        for number, (title, views) in made.items()
    }


def _head(column: Column) -> str:
    kind = f' data-target="{text(column.name)}"' if column.kind == "target" else ""
    first = "ascending" if column.metric.lower else "descending"
    edge = ' class="edge"' if column.kind in EDGES else ""
    return (
        f'<th scope="col" aria-sort="none" data-first="{first}"{kind}{edge}>'
        f'<button type="button">{text(column.name)}</button></th>'
    )


def _row(row: Row, table: Table) -> str:
    cells = []
    for at, (column, cell) in enumerate(zip(table.columns, row.cells, strict=True)):
        below = [other.cells[at] for other in table.rows]
        room = max(len(column.text(other)[1]) for other in below if other) if any(below) else 0
        cells.append(_cell(column, cell, room))
    return f'<tr><th scope="row">{text(row.label)}</th>{"".join(cells)}</tr>'


def _cell(column: Column, cell: Cell | None, room: int) -> str:
    """Mean and deviation as printed, ± below ±."""
    edge = ' class="edge"' if column.kind in EDGES else ""
    tail = f'<i class="w{min(room, 9)}"></i>' if room else ""
    if cell is None:
        return f'<td{edge}><span aria-label="no number">{MISSING}</span>{tail}</td>'
    mean, deviation = column.text(cell)
    if deviation:
        tail = f'<i class="w{min(room, 9)}"> ± {deviation}</i>'
    value = "" if math.isnan(cell.mean) else f' data-v="{repr(cell.mean).replace("inf", "Infinity")}"'
    return f"<td{edge}{value}>{MARKS[cell.mark].format(signed(mean))}{SAID[cell.mark]}{tail}</td>"
