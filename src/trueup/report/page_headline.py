"""The top of the page: what was run, the best method and its gain, failures and notes."""

import math
from collections import Counter
from collections.abc import Sequence

from trueup.report.page_markup import boxed, escape, join_words, minus_sign, plural, upper_first
from trueup.report.page_tables import TableGroup
from trueup.report.runs import Record, is_finished, run_key, target_of
from trueup.report.tables import Cell, Column, Row, Table, failures_note

FEW = 3  # groups with a sentence each; of more, only the largest has one


def headline(records: Sequence[Record], groups: Sequence[TableGroup]) -> str:
    """Return the paragraphs under the title."""
    paragraphs = [_overview(records)]
    if len(groups) <= FEW:
        paragraphs += [_winner(group, alone=len(groups) == 1) for group in groups]
    else:
        most = max(groups, key=lambda group: len(group.records))
        paragraphs += [_winner(most, alone=False), _tally(groups)]
    return "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs if paragraph)


def _overview(records: Sequence[Record]) -> str:
    settings = [record["settings"] for record in records]
    datasets, networks, methods = (
        list(dict.fromkeys(str(each[name]) for each in settings if each.get(name) is not None))
        for name in ("dataset", "network", "method")
    )
    targets = {(record["settings"].get("dataset"), target_of(record)) for record in records}
    seeds = {str(each["seed"]) for each in settings if each.get("seed") is not None}
    failed = sum(not is_finished(record) for record in records)
    where = f" on {join_words(datasets)}" if datasets else ""
    using = f" with {join_words(networks)}" if networks else ""
    lost = f"; {failed:,} failed" if failed else ""
    return escape(
        f"{plural(len(records), 'run')} of {plural(len(methods), 'method')}{where} "
        f"({plural(len(targets), 'target')}, {plural(len(seeds), 'seed')}){using}{lost}."
    )


def _winner(group: TableGroup, *, alone: bool) -> str:
    """Name the best average and its gain, and say if that is within the deviation over seeds."""
    table, at = group.default, _column(group.default, "average")
    words = _no_winner(table, at)
    if not words:
        seeds, ahead = len({run_key(record) for record in group.records}), _marked(table, at, "best")
        names = join_words([f"<strong>{escape(row.label)}</strong>{_few(row.cells[at], seeds)}" for row in ahead])
        kind = f" % {escape(table.metric.title.partition(' in %')[0])}" if table.metric.percent else ""
        number = f"{_number(table.columns[at], ahead[0].cells[at])}{kind}"
        words = f"best on average {'is' if len(ahead) == 1 else 'are'} {names} with {number}"
        words += f"{_gain(table, ahead, seeds)}.{_lead(table, at, ahead)}"
    return upper_first(words) if alone else f"On {escape(group.title)}: {words}"


def _no_winner(table: Table, at: int) -> str:
    """Say why there is no best method; empty if there is one."""
    there = [row for row in table.rows if row.cells[at]]
    ranked = [row for row in there if _comparable(row, at)]
    if not there:
        return "no method has a seed with every target, so there is no average to compare."
    if len(ranked) > 1:
        return ""
    if len(table.rows) == 1:
        return "there is one method only, so nothing to compare."
    if not ranked:
        return "no average can be compared: each is NaN, or an oracle's."
    what = "a seed with every target" if len(there) == 1 else "an average that can be compared"
    return f"only <strong>{escape(ranked[0].label)}</strong> has {what}, so there is nothing to compare."


def _gain(table: Table, ahead: Sequence[Row], seeds: int) -> str:
    at = _column(table, "gain")
    if any(row.method == "source" for row in ahead):
        gains = [cell.mean for row in table.rows if (cell := row.cells[at])]
        more = "; in the seeds that both have, some method gains over it" if any(gain > 0 for gain in gains) else ""
        return more or "; no method gains over the frozen source"
    if at < 0:
        return "; there is no run of source to compare with"
    cell = ahead[0].cells[at]
    if cell is None:
        return "; no seed in common with source has every target, so there is no gain"
    if math.isnan(cell.mean):
        return "; its gain over the frozen source is NaN"
    points = " points" if table.metric.percent else ""
    words = f", {_number(table.columns[at], cell)}{points} over the frozen source"
    if cell.std is None:
        one = f"one of {seeds} seeds" if seeds > 1 else "one seed"
        return f"{words} ({one}, so the deviation is not known)"
    words += _few(cell, seeds)
    return words + (" – within the deviation over seeds" if abs(cell.mean) <= cell.std else "")


def _lead(table: Table, at: int, ahead: Sequence[Row]) -> str:
    """Warn if the lead over the second best is within the deviation over seeds."""
    best = ahead[0].cells[at]
    others = [(cell, row) for row in table.rows if _comparable(row, at) and (cell := row.cells[at]) and not cell.mark]
    behind = [(cell, row) for row in _marked(table, at, "second") if (cell := row.cells[at])] or others
    if best is None or not behind or len(ahead) > 1:
        return ""
    close = []
    for cell, row in behind:
        spread = max((c.std for c in (best, cell) if c.std is not None), default=None)
        if spread is not None and abs(best.mean - cell.mean) <= spread:
            close.append(f"{escape(row.label)} ({_number(table.columns[at], cell)})")
    return f" Its lead over {join_words(close)} is within the deviation over seeds." if close else ""


def _column(table: Table, kind: str) -> int:
    """Return the index of the column of a kind; -1 if there is none."""
    kinds = [column.kind for column in table.columns]
    return kinds.index(kind) if kind in kinds else -1


def _comparable(row: Row, at: int) -> bool:
    return (cell := row.cells[at]) is not None and row.select != "oracle" and not math.isnan(cell.mean)


def _few(cell: Cell | None, seeds: int) -> str:
    """Say how many seeds a number is over, if not all."""
    return f" ({cell.n} of {plural(seeds, 'seed')})" if cell and cell.n < seeds else ""


def _tally(groups: Sequence[TableGroup]) -> str:
    """Count how often each method is best."""
    ahead = [_marked(group.default, _column(group.default, "average"), "best") for group in groups]
    counts = Counter(row.label for rows in ahead for row in rows)
    words = join_words([f"{escape(label)} in {count}" for label, count in counts.most_common()])
    some = sum(map(bool, ahead))
    where = f"the {some} of {len(groups)} tables that compare averages" if some < len(groups) else f"the {some} tables"
    return f"Best on average in {where}: {words}." if counts else ""


def _marked(table: Table, at: int, mark: str) -> list[Row]:
    return [row for row in table.rows if (cell := row.cells[at]) is not None and cell.mark == mark]


def _number(column: Column, cell: Cell | None) -> str:
    mean, spread = column.text(cell) if cell else ("–", "")
    return minus_sign(mean) + (f" ± {spread}" if spread else "")


def warnings(records: Sequence[Record], groups: Sequence[TableGroup]) -> str:
    """Return failed runs and the notes of all tables, folded."""
    failed = [record for record in records if not is_finished(record)]
    parts = []
    if failed:
        rows = ""
        for record in failed:
            settings, at = record["settings"], record.get("at")
            name = f"{settings.get('method')} on {settings.get('dataset')}/{target_of(record)}"
            where = f"<br><code>{escape(at[-1])}</code>" if isinstance(at, list) and at else ""
            error = f"<td>{escape(record.get('error', 'no results'))}{where}</td>"
            rows += f'<tr><th scope="row">{escape(name)}</th><td>{escape(settings.get("seed"))}</td>{error}</tr>'
        heads = "".join(f'<th scope="col">{name}</th>' for name in ("run", "seed", "error"))
        table = boxed("Failed runs", f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")
        summary = f"<summary><strong>{plural(len(failed), 'run')} failed</strong> of {len(records):,}</summary>"
        parts.append(f'<details class="alert failures">{summary}{table}</details>')
    notes: dict[str, list[str]] = {}
    for group in groups:
        for note in group.default.notes:
            if note != failures_note(group.records):  # listed above, with their errors
                notes.setdefault(note, []).append(group.title)
    if notes:
        words = [f"{join_words(where)}: {note}" if len(groups) > 1 else note for note, where in notes.items()]
        items = "".join(f"<li>{escape(note)}</li>" for note in words)
        summary = f"<summary><strong>{plural(len(notes), 'note')}</strong> on the numbers</summary>"
        parts.append(f'<details class="alert">{summary}<ul>{items}</ul></details>')
    return f'<section class="alerts" aria-label="Warnings">{"".join(parts)}</section>' if parts else ""
