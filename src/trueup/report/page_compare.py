"""Two sweeps side by side: runs with the same settings, what became of their numbers, and who has no partner."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.report.groups import groups
from trueup.report.metrics import METRICS, Metric
from trueup.report.page_markup import listed, plural, signed
from trueup.report.page_tables import latest, measured, value_of
from trueup.report.record_rows import Line, Record, done, key_of, lines_of, target_of
from trueup.report.tables import Cell, Column, Row, Table, in_order


@dataclass(frozen=True)
class Pairing:
    """Finished runs with their partners of the other sweep; pairs that failed on a side; runs of one side only."""

    pairs: tuple[tuple[Record, Record], ...]
    failed: tuple[tuple[Record, Record], ...]
    only: tuple[Record, ...]
    other: tuple[Record, ...]


def pair(records: Sequence[Record], against: Sequence[Record]) -> Pairing:
    """Match runs by id, else by all settings but the versions of code."""
    theirs = latest(against)
    by_id = {record["id"]: i for i, record in enumerate(theirs) if "id" in record}
    by_settings = {_settings(record): i for i, record in enumerate(theirs)}
    pairs, failed, only, used = [], [], [], set()
    for record in latest(records):
        at = by_id.get(record.get("id"), by_settings.get(_settings(record)))
        if at is None or at in used:
            only.append(record)
            continue
        used.add(at)
        if done(record) and done(theirs[at]):
            pairs.append((record, theirs[at]))
        else:
            failed.append((record, theirs[at]))
    left = [record for i, record in enumerate(theirs) if i not in used]
    return Pairing(tuple(pairs), tuple(failed), tuple(only), tuple(left))


def _settings(record: Record) -> str:
    return key_of({name: value for name, value in record["settings"].items() if name != "code"})


def differences(pairing: Pairing, names: tuple[str, str]) -> list[tuple[str, dict[str, Table]]]:
    """For each group its title and, by metric, a table of the first sweep minus the second."""
    partner = {id(mine): theirs for mine, theirs in pairing.pairs}
    found = []
    for group in groups([mine for mine, _ in pairing.pairs]):
        usual = group.metric.name
        metrics = sorted(measured(group.records), key=lambda metric: metric.name != usual)
        # What a search chose, or a label says, is the first sweep's.
        lines = lines_of(group.records, target_of)[0]
        found.append((group.title, {m.name: _table(lines, group.targets, partner, m, names) for m in metrics}))
    return found


def _table(
    lines: Sequence[Line], targets: Sequence[str], partner: dict[int, Record], metric: Metric, names: tuple[str, str]
) -> Table:
    rows = []
    for line in lines:
        gaps = [_gaps(line, target, partner, metric) for target in targets]
        cells = [_cell(some) for some in [*gaps, [gap for some in gaps for gap in some]]]
        rows.append(Row(line.label, line.method, line.select, tuple(cells)))
    columns = [*(Column(target, metric, "+") for target in targets), Column("all", metric, "+", "all")]
    better = "below zero" if metric.lower else "above zero"
    return Table(
        title=f"{metric.title}: {names[0]} minus {names[1]}",
        caption=f"Mean difference over pairs of runs with the same settings, {names[0]} minus {names[1]}; {better} "
        f"{names[0]} is better. ± is the sample standard deviation over pairs; all: over all pairs of the row.",
        metric=metric,
        columns=tuple(columns),
        rows=tuple(rows),
        notes=(),
    )


def _gaps(line: Line, target: str, partner: dict[int, Record], metric: Metric) -> list[float]:
    gaps = []
    for record in line.runs.get(target, {}).values():
        mine, theirs = value_of(record, metric), value_of(partner[id(record)], metric)
        gaps += [mine - theirs] if mine is not None and theirs is not None else []
    return gaps


def _cell(gaps: Sequence[float]) -> Cell | None:
    if not gaps:
        return None
    mean = sum(gaps) / len(gaps)
    squares = sum((gap - mean) * (gap - mean) for gap in gaps)
    return Cell(mean, math.sqrt(squares / (len(gaps) - 1)) if len(gaps) > 1 else None, len(gaps))


def verdict(pairing: Pairing, names: tuple[str, str]) -> str:
    """The comparison in a few sentences."""
    if not pairing.pairs:
        none = f"No finished run of {names[0]} has the settings of one of {names[1]}, so there is nothing to compare."
        return f"{none}{_apart(pairing, names)}"
    words = [f"{plural(len(pairing.pairs), 'run')} finished in both with the same settings."]
    for metric in (METRICS["accuracy"], METRICS["dice"]):
        found = [(value_of(mine, metric), value_of(theirs, metric)) for mine, theirs in pairing.pairs]
        gaps = [a - b for a, b in found if a is not None and b is not None]
        if cell := _cell(gaps):
            spread = f" ± {metric.text(cell.std)}" if cell.std is not None else ""
            words.append(
                f"In {metric.name} {gaps.count(0.0):,} of {len(gaps):,} are equal to the last digit; the mean "
                f"difference ({names[0]} minus {names[1]}) is {signed(metric.text(cell.mean, '+'))}{spread} points."
            )
    return " ".join(words)


def _apart(pairing: Pairing, names: tuple[str, str]) -> str:
    """The settings that keep all runs of one sweep from having a partner: those without a value in common."""
    sides = [[_flat(record["settings"]) for record in some] for some in (pairing.only, pairing.other)]
    said = []
    for name in dict.fromkeys(name for side in sides for each in side for name in each):
        mine, theirs = ({key_of(each.get(name)) for each in side} for side in sides)
        if mine and theirs and not mine & theirs:
            values = (listed(in_order(_known(each.get(name)) for each in side), 3) for side in sides)
            said.append(f"{name} ({'; '.join(f'{who}: {some}' for who, some in zip(names, values, strict=True))})")
    return f" They differ in {listed(said)}." if said else ""


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Settings by name, those inside others behind these; versions of code are left out, as in matching."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{above}{name} ") if name != "code" else {}
        else:
            found[f"{above}{name}"] = value
    return found


def _known(value: Any) -> Any:
    return "none" if value is None else value


def failures(pairing: Pairing, names: tuple[str, str]) -> list[tuple[str, list[Record]]]:
    """Runs that are in both sweeps, by where they failed."""
    sides = ((names[0], (False, True)), (names[1], (True, False)), ("both", (False, False)))
    return [
        (where, [mine for mine, theirs in pairing.failed if (done(mine), done(theirs)) == state])
        for where, state in sides
    ]


def named(records: Sequence[Record]) -> list[str]:
    """Runs in few words: the seeds of each method on each target."""
    found: dict[str, list[Record]] = {}
    for record in records:
        settings = record["settings"]
        found.setdefault(f"{settings.get('method')} on {settings.get('dataset')}/{target_of(record)}", []).append(
            record
        )
    said = []
    for name, some in found.items():
        seeds = in_order(record["settings"].get("seed") for record in some)
        several = f" ({len(some)} runs)" if len(some) > len(seeds) else ""
        said.append(f"{name}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}{several}")
    return said
