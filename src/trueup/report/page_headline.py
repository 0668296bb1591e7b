"""What a page says first: what was run, who is best and by how much, and what to know before trusting it."""

import math
from collections import Counter
from collections.abc import Sequence

from trueup.report.page_markup import listed, plural, signed, text
from trueup.report.page_tables import Block
from trueup.report.record_rows import Record, done, run_of, target_of
from trueup.report.tables import Cell, Column, Row, Table

FEW = 3  # groups that have a sentence each; of more only the largest has


def headline(records: Sequence[Record], blocks: Sequence[Block]) -> str:
    """The paragraphs under the title."""
    paragraphs = [_ran(records)]
    if len(blocks) <= FEW:
        paragraphs += [_winner(block, alone=len(blocks) == 1) for block in blocks]
    else:
        most = max(blocks, key=lambda block: len(block.records))
        paragraphs += [_winner(most, alone=False), _tally(blocks)]
    return "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs if paragraph)


def _ran(records: Sequence[Record]) -> str:
    settings = [record["settings"] for record in records]
    datasets, networks, methods = (
        list(dict.fromkeys(str(each[name]) for each in settings if each.get(name) is not None))
        for name in ("dataset", "network", "method")
    )
    targets = {(record["settings"].get("dataset"), target_of(record)) for record in records}
    seeds = {str(each["seed"]) for each in settings if each.get("seed") is not None}
    failed = sum(not done(record) for record in records)
    where = f" on {listed(datasets)}" if datasets else ""
    using = f" with {listed(networks)}" if networks else ""
    lost = f"; {failed:,} failed" if failed else ""
    return text(
        f"{plural(len(records), 'run')} of {plural(len(methods), 'method')}{where} "
        f"({plural(len(targets), 'target')}, {plural(len(seeds), 'seed')}){using}{lost}."
    )


def _winner(block: Block, *, alone: bool) -> str:
    """Who has the best average, its gain, and whether that is more than seeds make by themselves."""
    table, at = block.usual, _column(block.usual, "average")
    said = _nobody(table, at) or _best(table, at, len({run_of(record) for record in block.records}))
    return f"{said[0].upper()}{said[1:]}" if alone else f"On {text(block.title)}: {said}"


def _nobody(table: Table, at: int) -> str:
    """Why nothing is best, if so."""
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
    return f"only <strong>{text(ranked[0].label)}</strong> has {what}, so there is nothing to compare."


def _best(table: Table, at: int, seeds: int) -> str:
    ahead = _marked(table, at, "best")
    names = listed([f"<strong>{text(row.label)}</strong>{_few(row.cells[at], seeds)}" for row in ahead])
    number = _said(table.columns[at], ahead[0].cells[at])
    verb = "is" if len(ahead) == 1 else "are"
    kind = f" % {text(table.metric.title.partition(' in %')[0])}" if table.metric.percent else ""
    said = f"best on average {verb} {names} with {number}{kind}"
    return f"{said}{_gain(table, ahead, seeds)}.{_lead(table, at, ahead)}"


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
    said = f", {_said(table.columns[at], cell)}{points} over the frozen source"
    if cell.std is None:
        one = f"one of {seeds} seeds" if seeds > 1 else "one seed"
        return f"{said} ({one}, so the deviation is not known)"
    said += _few(cell, seeds)
    return said + (" – within the deviation over seeds" if abs(cell.mean) <= cell.std else "")


def _lead(table: Table, at: int, ahead: Sequence[Row]) -> str:
    """A word of caution where the next best is as good as the best."""
    best = ahead[0].cells[at]
    others = [(cell, row) for row in table.rows if _comparable(row, at) and (cell := row.cells[at]) and not cell.mark]
    behind = [(cell, row) for row in _marked(table, at, "second") if (cell := row.cells[at])] or others
    if best is None or not behind or len(ahead) > 1:
        return ""
    close = []
    for cell, row in behind:
        spread = max((c.std for c in (best, cell) if c.std is not None), default=None)
        if spread is not None and abs(best.mean - cell.mean) <= spread:
            close.append(f"{text(row.label)} ({_said(table.columns[at], cell)})")
    return f" Its lead over {listed(close)} is within the deviation over seeds." if close else ""


def _column(table: Table, kind: str) -> int:
    """Where the column of a kind is; -1 if there is none."""
    kinds = [column.kind for column in table.columns]
    return kinds.index(kind) if kind in kinds else -1


def _comparable(row: Row, at: int) -> bool:
    return (cell := row.cells[at]) is not None and row.select != "oracle" and not math.isnan(cell.mean)


def _few(cell: Cell | None, seeds: int) -> str:
    """On how many seeds a number rests, if not on all."""
    return f" ({cell.n} of {plural(seeds, 'seed')})" if cell and cell.n < seeds else ""


def _tally(blocks: Sequence[Block]) -> str:
    """How often each method is best."""
    ahead = []
    for block in blocks:
        at = _column(block.usual, "average")
        ahead.append([row.label for row in _marked(block.usual, at, "best")])
    counts = Counter(label for labels in ahead for label in labels)
    said = listed([f"{text(label)} in {count}" for label, count in counts.most_common()])
    some = sum(map(bool, ahead))
    where = f"the {some} of {len(blocks)} tables that compare averages" if some < len(blocks) else f"the {some} tables"
    return f"Best on average in {where}: {said}." if counts else ""


def _marked(table: Table, at: int, mark: str) -> list[Row]:
    return [row for row in table.rows if (cell := row.cells[at]) is not None and cell.mark == mark]


def _said(column: Column, cell: Cell | None) -> str:
    mean, spread = column.text(cell) if cell else ("–", "")
    return signed(mean) + (f" ± {spread}" if spread else "")


def warnings(records: Sequence[Record], blocks: Sequence[Block]) -> str:
    """Failed runs, and the notes of all tables, folded."""
    failed = [record for record in records if not done(record)]
    rows = "".join(_failure(record) for record in failed)
    parts = []
    if failed:
        heads = "".join(f'<th scope="col">{name}</th>' for name in ("run", "seed", "error"))
        parts.append(
            f'<details class="alert failures"><summary><strong>{plural(len(failed), "run")} failed</strong> '
            f'of {len(records):,}</summary><div class="box" tabindex="0" role="region" aria-label="Failed runs">'
            f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>"
        )
    notes: dict[str, list[str]] = {}
    for block in blocks:
        for note in block.usual.notes:
            if not note.startswith("failed runs"):  # they are above, with their errors
                notes.setdefault(note, []).append(block.title)
    if notes:
        said = [f"{listed(where)}: {note}" if len(blocks) > 1 else note for note, where in notes.items()]
        items = [f"<li>{text(note)}</li>" for note in said]
        parts.append(
            f'<details class="alert"><summary><strong>{plural(len(notes), "note")}</strong> on the numbers'
            f"</summary><ul>{''.join(items)}</ul></details>"
        )
    return f'<section class="alerts" aria-label="Warnings">{"".join(parts)}</section>' if parts else ""


def _failure(record: Record) -> str:
    settings = record["settings"]
    name = f"{settings.get('method')} on {settings.get('dataset')}/{target_of(record)}"
    at = record.get("at")
    where = f"<br><code>{text(at[-1])}</code>" if isinstance(at, list) and at else ""
    error = f"{text(record.get('error', 'no results'))}{where}"
    return f'<tr><th scope="row">{text(name)}</th><td>{text(settings.get("seed"))}</td><td>{error}</td></tr>'
