"""Comparison of two sweeps: pairs of runs with the same settings, their differences, and unpaired runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trueup.report.groups import Group, group_runs
from trueup.report.metrics import METRICS, Metric
from trueup.report.page_markup import escape, join_words, minus_sign, plural
from trueup.report.page_tables import Views, measured_metrics, tables_html, value_of
from trueup.report.runs import Record, is_finished, json_key, latest_runs, seeds_text, target_of, unique_texts
from trueup.report.tables import Cell, Column, Row, Table


@dataclass(frozen=True)
class Pairing:
    """Pairs of finished runs, pairs with a failed run, and the runs of one sweep only."""

    pairs: list[tuple[Record, Record]] = field(default_factory=list)
    failed: list[tuple[Record, Record]] = field(default_factory=list)
    only: list[Record] = field(default_factory=list)
    other: list[Record] = field(default_factory=list)


def pair_runs(records: Sequence[Record], against: Sequence[Record]) -> Pairing:
    """Match runs by id, else by all settings but the code versions."""
    theirs = latest_runs(against)
    by_id = {record["id"]: i for i, record in enumerate(theirs) if "id" in record}
    by_settings = {_settings(record): i for i, record in enumerate(theirs)}
    found, used = Pairing(), set[int]()
    for record in latest_runs(records):
        at = by_id.get(record.get("id"), by_settings.get(_settings(record)))
        if at is None or at in used:
            found.only.append(record)
            continue
        used.add(at)
        both = is_finished(record) and is_finished(theirs[at])
        (found.pairs if both else found.failed).append((record, theirs[at]))
    found.other.extend(record for i, record in enumerate(theirs) if i not in used)
    return found


def _settings(record: Record) -> str:
    return json_key({name: value for name, value in record["settings"].items() if name != "code"})


def difference_tables(pairing: Pairing, names: tuple[str, str]) -> list[tuple[str, dict[str, Table]]]:
    """Return, for each group, its title and by metric a table of the first sweep minus the second."""
    partner = {id(mine): theirs for mine, theirs in pairing.pairs}
    groups = group_runs([mine for mine, _ in pairing.pairs])
    return [
        (group.title, {m.name: _table(group, partner, m, names) for m in measured_metrics(group.records)})
        for group in groups
    ]


def _table(group: Group, partner: dict[int, Record], metric: Metric, names: tuple[str, str]) -> Table:
    rows = []
    for variant in group.variants:
        runs = [variant.runs.get(target, {}).values() for target in group.targets]
        gaps = [differences([(record, partner[id(record)]) for record in some], metric) for some in runs]
        cells = [Cell.over(some) for some in [*gaps, [gap for some in gaps for gap in some]]]
        rows.append(Row(variant.label, variant.method, variant.select, tuple(cells)))
    columns = [*(Column(target, metric, "+") for target in group.targets), Column("all", metric, "+", "all")]
    better = "below zero" if metric.lower else "above zero"
    caption = (
        f"Mean difference over pairs of runs with the same settings, {names[0]} minus {names[1]}; {better} {names[0]} "
        "is better. ± is the sample standard deviation over pairs; all: over all pairs of the row."
    )
    return Table(f"{metric.title}: {names[0]} minus {names[1]}", caption, metric, tuple(columns), tuple(rows))


def differences(pairs: Iterable[tuple[Record, Record]], metric: Metric) -> list[float]:
    """Return the first minus the second, for the pairs that have the metric."""
    found = [(value_of(mine, metric), value_of(theirs, metric)) for mine, theirs in pairs]
    return [a - b for a, b in found if a is not None and b is not None]


def comparison_text(pairing: Pairing, names: tuple[str, str]) -> str:
    """Summarise the comparison in a few sentences."""
    if not pairing.pairs:
        none = f"No finished run of {names[0]} has the settings of one of {names[1]}, so there is nothing to compare."
        return f"{none}{_apart(pairing, names)}"
    words = [f"{plural(len(pairing.pairs), 'run')} finished in both with the same settings."]
    for metric in (METRICS["accuracy"], METRICS["dice"]):
        gaps = differences(pairing.pairs, metric)
        if cell := Cell.over(gaps):
            spread = f" ± {metric.text(cell.std)}" if cell.std is not None else ""
            words.append(
                f"In {metric.name} {gaps.count(0.0):,} of {len(gaps):,} are equal to the last digit; the mean "
                f"difference ({names[0]} minus {names[1]}) is {minus_sign(metric.text(cell.mean, '+'))}{spread} points."
            )
    return " ".join(words)


def _apart(pairing: Pairing, names: tuple[str, str]) -> str:
    """Name the settings in which the sweeps have no value in common, so that no run has a partner."""
    sides = [[_flat(record["settings"]) for record in some] for some in (pairing.only, pairing.other)]
    words = []
    for name in dict.fromkeys(name for side in sides for each in side for name in each):
        mine, theirs = ({json_key(each.get(name)) for each in side} for side in sides)
        if mine and theirs and not mine & theirs:
            values = [["none" if each.get(name) is None else each[name] for each in side] for side in sides]
            texts = [f"{who}: {join_words(unique_texts(v), 3)}" for who, v in zip(names, values, strict=True)]
            words.append(f"{name} ({'; '.join(texts)})")
    return f" They differ in {join_words(words)}." if words else ""


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return settings by name, nested ones with their path; code versions are left out."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{above}{name} ") if name != "code" else {}
        else:
            found[f"{above}{name}"] = value
    return found


def comparison_html(pairing: Pairing, views: Views, names: tuple[str, str]) -> str:
    """Return a summary, the tables of differences, and lists of the runs that could not be compared."""
    parts = [f'<p class="verdict">{escape(comparison_text(pairing, names))}</p>']
    parts += [tables_html(number, title, tables) for number, (title, tables) in views.items()]
    lists: list[tuple[str, Sequence[Record]]]
    lists = [(f"in {names[0]} only", pairing.only), (f"in {names[1]} only", pairing.other)]
    for who, state in ((names[0], (False, True)), (names[1], (True, False)), ("both", (False, False))):
        failed = [mine for mine, other in pairing.failed if (is_finished(mine), is_finished(other)) == state]
        lists.append((f"in both, but failed in {who}", failed))
    for where, some in lists:
        if some:
            items = "".join(f"<li>{escape(name)}</li>" for name in run_names(some))
            summary = f"<summary><strong>{plural(len(some), 'run')}</strong> {escape(where)}</summary>"
            parts.append(f"<details>{summary}<ul class=runs-list>{items}</ul></details>")
    return "".join(parts)


def run_names(records: Sequence[Record]) -> list[str]:
    """List the seeds of each method on each target."""
    found: dict[str, list[Record]] = {}
    for record in records:
        settings = record["settings"]
        name = f"{settings.get('method')} on {settings.get('dataset')}/{target_of(record)}"
        found.setdefault(name, []).append(record)
    names = []
    for name, some in found.items():
        seeds = {str(record["settings"].get("seed")) for record in some}
        names.append(f"{name}, {seeds_text(some)}" + (f" ({len(some)} runs)" if len(some) > len(seeds) else ""))
    return names
