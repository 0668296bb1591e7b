"""Published tables beside ours: ours | paper | difference, in the paper's units."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from trueup.bench.records import Entry
from trueup.report.metrics import METRICS, Metric
from trueup.report.page_markup import upper_first
from trueup.report.runs import Record, is_finished
from trueup.report.tables import Cell, Column, Row, Table, caveats, mean_of

SUMMED = ("seconds",)  # summed over the targets of a seed; all others are averaged
UNITS = {"peak_memory_mb": (1 / 1024, "peak memory in GB"), "seconds": (1.0, "seconds, all targets of a seed together")}
PLAIN = Metric("number", "number", "results", digits=2)
Entries = Mapping[tuple[str, str], Entry]


def compare_with_paper(
    title: str,
    entries: Entries,
    records: Iterable[Record],
    *,
    notes: Sequence[str] = (),
    literature: Sequence[str] = (),
) -> Table:
    """Make the table of these entries; a cell counts the seeds of which all runs have finished."""
    rows, names = (list(dict.fromkeys(key[i] for key in entries)) for i in (0, 1))
    found = {record["id"]: record for record in records if is_finished(record)}
    ours = {key: values_of(key, entries, found) for key in entries}
    columns, cells = list[Column](), {row: list[Cell | None]() for row in rows}
    for name in names:
        here = {row: entries[row, name] for row in rows if (row, name) in entries}
        printed = [str(entry.paper) for entry in here.values() if entry.paper is not None]
        digits = max([len(number.partition(".")[2].rstrip("0")) for number in printed], default=1)
        metric = replace(PLAIN, digits=max(digits, 1) if all(e.counted is None for e in here.values()) else 0)
        kinds = ("ours", "paper", "difference") if printed else ("ours",)
        columns += [Column(f"{name} {kind}", metric, "+" if kind == "difference" else "") for kind in kinds]
        for row in rows:
            cells[row] += _cells(ours.get((row, name), {}), here.get(row, Entry()))[: len(kinds)]
    missing = sum(not ours[key] for key in entries if key[0] not in literature)
    remarks = [f"{missing} of our cells are empty: their runs have not finished"] if missing else []
    seeds = {seed for values in ours.values() for seed in values}
    fewer = sum(0 < len(ours[key]) < len(seeds) for key in entries if entries[key].counted is None)
    remarks += [f"{fewer} of our cells have fewer than {len(seeds)} seeds"] if fewer else []
    used = {name for entry in entries.values() for _, name in entry.runs}
    remarks += caveats([record for name, record in found.items() if name in used], 0)
    remarks += [f"from the literature, as the paper prints it: {', '.join(literature)}"] if literature else []
    made = tuple(Row(row, row, "default", tuple(cells[row])) for row in rows)
    return Table(title, _caption(entries, ours), PLAIN, tuple(columns), made, (*remarks, *notes))


def values_of(key: tuple[str, str], entries: Entries, found: Mapping[str, Record]) -> dict[int, float]:
    """Return our numbers by seed, in the paper's unit."""
    entry = entries[key]
    if entry.counted is not None:
        return {0: entry.counted}
    if entry.parts:
        parts = [values_of((key[0], part), entries, found) for part in entry.parts]
        seeds = [seed for seed in parts[0] if all(seed in part for part in parts)]
        return {seed: mean_of([part[seed] for part in parts]) for seed in seeds}
    metric = METRICS[entry.metric]
    scale = 100 if metric.percent else UNITS.get(entry.metric, (1.0, ""))[0]
    by_seed: dict[int, list[float | None]] = {}
    for seed, name in entry.runs:
        record = found.get(name, {})
        by_seed.setdefault(seed, []).append(record.get(metric.section, {}).get(metric.name))
    whole = {seed: [v for v in values if v is not None] for seed, values in by_seed.items() if None not in values}
    together = sum if entry.metric in SUMMED else mean_of
    return {seed: scale * together(values) for seed, values in whole.items()}


def _cells(ours: Mapping[int, float], entry: Entry) -> list[Cell | None]:
    mine = Cell.over(ours.values())
    theirs = None if entry.paper is None else Cell(entry.paper, entry.deviation, 1)
    return [mine, theirs, Cell(mine.mean - theirs.mean, None, 1) if mine and theirs else None]


def _caption(entries: Entries, ours: Mapping[tuple[str, str], Mapping[int, float]]) -> str:
    metrics = dict.fromkeys(entry.metric for entry in entries.values() if entry.runs)
    what = "; ".join(UNITS.get(name, (0, METRICS[name].title))[1] for name in metrics)
    seeds = sorted({seed for values in ours.values() for seed in values})
    spread = "; ± is the sample deviation over seeds" if len(seeds) > 1 else ""
    over = f" Ours: seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}{spread}." if metrics and seeds else ""
    return f"{upper_first(what)}.{over}" if what else "Numbers of images."
