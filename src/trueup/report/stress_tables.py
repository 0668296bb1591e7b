"""Scenarios × methods: how accurate each method is, how far from the frozen source, and where it is at its worst."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.report.metrics import METRICS, Metric
from trueup.report.record_rows import Line, Record, base_of, done, key_of, lines_of, target_of, variants
from trueup.report.tables import WITHIN, Cell, Column, Row, Table, doubts, in_order, mark

WITHIN_STRESS = (*WITHIN, "stream", "stream_options", "batch", "limit", "repeat", "disturb")
OF_SOURCE = ("algorithm", "iterations", "size", "multilabel")  # what of its training tells two sources apart
Name = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Spot:
    """A method in a scenario: means over runs (a target and a seed each), and the run that was worst."""

    mean: float
    runs: int
    difference: float | None = None
    """From the frozen source in the same runs; None for the source itself."""
    lowest: float | None = None
    """The difference of the single worst run,"""
    where: str = ""
    """and which one that is."""


@dataclass(frozen=True)
class Ordeal:
    """A method in all scenarios; None where runs are missing."""

    label: str
    method: str
    select: str
    spots: tuple[Spot | None, ...]

    @property
    def worst(self) -> int | None:
        """The number of the scenario with the lowest mean difference from the source."""
        found = {i: s.difference for i, s in enumerate(self.spots) if s is not None and s.difference is not None}
        return min(found, key=found.__getitem__, default=None)


@dataclass(frozen=True)
class StressTest:
    """What `trueup stress` found on one dataset with one network."""

    title: str
    caption: str
    metric: Metric
    scenarios: tuple[str, ...]
    rows: tuple[Ordeal, ...]
    notes: tuple[str, ...]

    def tables(self) -> list[Table]:
        """Three tables for `render`: the metric, its difference from the source, and that of the single worst run."""
        return [
            self._table(f"{self.metric.title}, higher is better", lambda spot: spot.mean, sign="", notes=self.notes),
            self._table("difference from source in points, mean over runs", lambda spot: spot.difference),
            self._table("difference from source in points, worst single run", lambda spot: spot.lowest),
        ]

    def _table(
        self, what: str, of: Callable[[Spot], float | None], *, sign: str = "+", notes: Sequence[str] = ()
    ) -> Table:
        columns = [Column(name, self.metric, sign) for name in self.scenarios] + [Column("worst", self.metric, "+")]
        rows = []
        for ordeal in self.rows:
            found = [(spot, of(spot)) if spot else (None, None) for spot in ordeal.spots]
            cells = [Cell(value, None, spot.runs) if spot and value is not None else None for spot, value in found]
            rows.append(Row(ordeal.label, ordeal.method, ordeal.select, (*cells, _worst(ordeal, cells, sign))))
        for at, column in enumerate(columns):
            mark(rows, at, column)
        return Table(f"{self.title}: {what}", self.caption, self.metric, tuple(columns), tuple(rows), tuple(notes))


def _worst(ordeal: Ordeal, cells: Sequence[Cell | None], sign: str) -> Cell | None:
    """The lowest difference of a row: of those that it shows, or else of the mean ones."""
    if sign:
        return min((cell for cell in cells if cell is not None), key=lambda cell: cell.mean, default=None)
    spot = None if ordeal.worst is None else ordeal.spots[ordeal.worst]
    return None if spot is None or spot.difference is None else Cell(spot.difference, None, spot.runs)


def stress_tests(
    records: Iterable[Record], scenario: Name, *, order: Sequence[str] = (), label: Name = lambda settings: ""
) -> list[StressTest]:
    """One for each dataset and network. `scenario` names a run's from its settings, `order` says how they come.

    `label` may give a row a name of its own, from the settings of any of its runs.
    """
    groups: dict[str, list[Record]] = {}
    for record in {record["id"]: record for record in records}.values():
        groups.setdefault(key_of(_shared(record)), []).append(record)
    return [_test(group, scenario, order, label) for group in groups.values() if any(map(done, group))]


def _shared(record: Record) -> dict[str, Any]:
    settings = {name: value for name, value in record["settings"].items() if name not in WITHIN_STRESS}
    source = settings.pop("source", None) or {}
    # A file of a model may be another one for each target and seed.
    return settings | {"training": {name: source[name] for name in OF_SOURCE if name in source}}


def _test(group: Sequence[Record], scenario: Name, order: Sequence[str], label: Name) -> StressTest:
    seen = dict.fromkeys(scenario(record["settings"]) for record in group)
    scenarios = [*(name for name in order if name in seen), *(name for name in seen if name not in order)]
    finished = [record for record in group if done(record)]
    metric = METRICS["dice" if "dice" in finished[0]["results"] else "accuracy"]
    lines, repeated = lines_of(finished, lambda record: (scenario(record["settings"]), target_of(record)))
    renamed = _rename(lines, label)
    base = base_of(lines)
    rows = [Ordeal(a.label, a.method, a.select, tuple(_spot(a, base, s, metric) for s in scenarios)) for a in lines]
    words = [*_verdicts(rows, scenarios, metric), _refusals(lines), _failures(group, scenario), *renamed]
    words += variants([line for line in lines if not any(note.startswith(f"{line.label} is ") for note in renamed)])
    alone = "no differences: there are no runs of source" if base is None else ""
    settings = group[0]["settings"]
    return StressTest(
        title=f"{settings.get('dataset')}, {settings.get('network')}",
        caption=_caption(finished),
        metric=metric,
        scenarios=tuple(scenarios),
        rows=tuple(rows),
        notes=tuple(word for word in (*words, alone, *doubts(group, repeated)) if word),
    )


def _spot(line: Line, base: Line | None, scenario: str, metric: Metric) -> Spot | None:
    places = [place for place in line.runs if place[0] == scenario]
    mine = {(place[1], run): v for place in places for run, v in line.values(place, metric).items()}
    if not mine:
        return None
    theirs = {}
    if base is not None and base is not line:
        theirs = {(place[1], run): v for place in places for run, v in base.values(place, metric).items()}
    gaps = {at: mine[at] - theirs[at] for at in mine if at in theirs}
    mean = sum(mine.values()) / len(mine)
    if not gaps:
        return Spot(mean, len(mine))
    target, (seed, _) = low = min(gaps, key=gaps.__getitem__)
    return Spot(mean, len(mine), sum(gaps.values()) / len(gaps), gaps[low], f"{target}, seed {seed}")


def _verdicts(rows: Sequence[Ordeal], scenarios: Sequence[str], metric: Metric) -> list[str]:
    """For each method the scenario that is its worst, and the worst single run if there are several."""
    said = []
    for row in rows:
        spots = {scenarios[i]: spot for i, spot in enumerate(row.spots) if spot is not None and spot.lowest is not None}
        if row.worst is None:
            continue
        mean = spots[scenarios[row.worst]].difference or 0.0
        said.append(f"{row.label}: worst in {scenarios[row.worst]}, {metric.text(mean, '+')} points")
        if any(spot.runs > 1 for spot in spots.values()):
            name, low = min(spots.items(), key=lambda item: item[1].lowest or 0.0)
            said[-1] += f"; worst single run {metric.text(low.lowest or 0.0, '+')} ({name}, {low.where})"
    return said


def _rename(lines: Sequence[Line], label: Name) -> list[str]:
    """Give lines names of their own where those tell them apart: what each was called before, if that says more."""
    names = [label(next(r for runs in line.runs.values() for r in runs.values())["settings"]) for line in lines]
    said = []
    for line, name in zip(lines, names, strict=True):
        if name and names.count(name) == 1:
            said += [f"{name} is {line.label}"] if sum(other.method == line.method for other in lines) > 1 else []
            line.label = name
    return said


def _failures(group: Sequence[Record], scenario: Name) -> str:
    failed = [record["settings"] for record in group if not done(record)]
    names = dict.fromkeys(f"{settings['method']} in {scenario(settings)}" for settings in failed)
    return f"failed runs ({len(failed)}): {', '.join(names)}" if failed else ""


def _refusals(lines: Sequence[Line]) -> str:
    counts = {
        line.label: sum(r["results"].get("refused", 0) for runs in line.runs.values() for r in runs.values())
        for line in lines
    }
    said = ", ".join(f"{label} {count}" for label, count in counts.items() if count)
    return f"batches that were refused, and so count as wrong: {said}" if said else ""


def _caption(records: Sequence[Record]) -> str:
    targets = list(dict.fromkeys(target_of(r) for r in records if "+" not in target_of(r)))
    seeds = in_order(record["settings"].get("seed") for record in records)
    return (
        f"Mean over runs: target{'s' * (len(targets) != 1)} {', '.join(targets) or 'joined'}; "
        f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}. "
        "Differences are from the frozen source model in the same scenario, target and seed; "
        "worst: the lowest of the row."
    )
