"""The list of runs on the page, and all fields of their records for the script."""

from collections.abc import Mapping, Sequence
from typing import Any

from trueup.report.groups import group_runs
from trueup.report.metrics import METRICS
from trueup.report.page_markup import boxed, escape, minus_sign, sort_button
from trueup.report.page_tables import value_of
from trueup.report.variants import Record, is_finished, json_key, target_of

SHOWN = ("accuracy", "dice", "seconds")  # metrics of a run
MOST = 50  # numbers of a list or map; longer ones would fill the page
DIGITS = 6  # of a number
DEEP = 3  # levels of a field; deeper values are not split


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
        count = _numbers(inner) if path else 0  # a whole section is never left out
        if count > MOST:
            found.append((here, f"{count:,} numbers: see records.jsonl"))
        elif isinstance(inner, Mapping) and inner and len(here) < DEEP:
            found += _fields(inner, here)
        else:
            found.append((here, _short(inner)))
    return found


def _numbers(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_numbers, value.values()))
    return sum(map(_numbers, value)) if isinstance(value, list) else isinstance(value, int | float)


def _short(value: Any) -> Any:
    """Round the numbers in a value."""
    if isinstance(value, Mapping):
        return {name: _short(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
