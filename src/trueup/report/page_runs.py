"""Every run of a page: a row each, and all that its record says behind a click."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trueup.report.groups import groups
from trueup.report.metrics import METRICS
from trueup.report.page_markup import signed, text
from trueup.report.page_tables import value_of
from trueup.report.record_rows import Record, done, target_of

SHOWN = ("accuracy", "dice", "seconds")  # of a run's numbers
MOST = 50  # numbers of a list or map; more of them, a thousand times, would be most of the page
DIGITS = 6  # of a number
DEEP = 3  # names of a knob, from its section on; what lies deeper stays together


def runs(records: Sequence[Record]) -> str:
    """The table of all runs."""
    metrics = [METRICS[name] for name in SHOWN if any(value_of(r, METRICS[name]) is not None for r in records)]
    names = ["method", "dataset", "target", "network", "seed", "stream"]
    heads = [(name, "ascending", "seed" if name == "seed" else "word") for name in names]
    heads += [(f"{m.name}{', %' * m.percent}", "ascending" if m.lower else "descending", "number") for m in metrics]
    head = "".join(
        f'<th scope="col" aria-sort="none" data-first="{first}" data-kind="{kind}">'
        f'<button type="button">{text(name)}</button></th>'
        for name, first, kind in [*heads, ("state", "ascending", "word")]
    )
    called = _labels(records)
    body = []
    for i, record in enumerate(records):
        settings = record["settings"]
        label = called.get(i, str(settings.get("method")))
        words = [settings.get("dataset"), target_of(record), settings.get("network"), settings.get("seed")]
        cells = [f"<td>{text('' if word is None else word)}</td>" for word in [*words, settings.get("stream")]]
        found = [(metric, value_of(record, metric)) for metric in metrics]
        cells += [f"<td>{'–' if value is None else signed(metric.text(value))}</td>" for metric, value in found]
        state = "<td>done</td>" if done(record) else '<td class="failed">failed</td>'
        name = f'<th scope="row"><button type="button" aria-expanded="false">{text(label)}</button></th>'
        body.append(f'<tr data-run="{i}">{name}{"".join(cells)}{state}</tr>')
    return (
        '<div class="box" tabindex="0" role="region" aria-label="All runs">'
        f'<table class="runs" style="--numbers:{len(metrics)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _labels(records: Sequence[Record]) -> dict[int, str]:
    """What a run's row is called in the tables."""
    numbers = {id(record): i for i, record in enumerate(records)}
    return {
        numbers[id(record)]: line.label
        for group in groups(records)
        for line in group.lines
        for place in line.runs.values()
        for record in place.values()
    }


def columns(records: Sequence[Record]) -> dict[str, Any]:
    """What records say, by knob: each value once, and who has which. None: all have the only one; -1: has none."""
    flat = [dict(_knobs(record)) for record in records]
    paths = list(dict.fromkeys(path for each in flat for path in each))
    values, which = [], []
    for path in paths:
        seen: dict[str, int] = {}
        kept: list[Any] = []
        row = []
        for each in flat:
            key = json.dumps(each[path], sort_keys=True) if path in each else ""
            if key and key not in seen:
                seen[key] = len(kept)
                kept.append(each[path])
            row.append(seen.get(key, -1))
        values.append(kept)
        which.append(row if any(row) else None)
    return {"paths": paths, "values": values, "which": which}


def _knobs(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Names from the section down to the knob, and its value."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, inner in value.items():
        here = (*path, str(name))
        count = _numbers(inner) if path else 0  # a section as a whole is never left out
        if count > MOST:
            found.append((here, f"{count:,} numbers: see records.jsonl"))
        elif isinstance(inner, Mapping) and inner and len(here) < DEEP:
            found += _knobs(inner, here)
        else:
            found.append((here, _short(inner)))
    return found


def _numbers(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_numbers, value.values()))
    return sum(map(_numbers, value)) if isinstance(value, list) else isinstance(value, int | float)


def _short(value: Any) -> Any:
    """A value with no more digits than one reads."""
    if isinstance(value, Mapping):
        return {name: _short(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
