"""Runs that may stand in one figure: those of a table. What groups are called, and which rows a figure shows."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trueup.report.metrics import METRICS, Metric
from trueup.report.record_rows import Line, Record, Run, base_of, done, key_of, lines_of, target_of
from trueup.report.tables import in_order, shared
from trueup.report.traces import Trace

Lookup = Callable[[Record], Trace | None]

ORDER = ("network", "stream", "stream_options", "batch", "disturb", "repeat", "limit", "reset")  # what to name first
VALUES = 3  # of a hyper-parameter, from which on it is being swept


@dataclass(frozen=True)
class Group:
    """Finished runs that share every setting but method, hyper-parameters, target and seed."""

    title: str
    """The dataset, and what sets it apart from other groups."""
    name: str
    records: tuple[Record, ...]
    place: Callable[[Record], Any] = field(default=target_of)

    @cached_property
    def lines(self) -> list[Line]:
        """Its rows, with the labels that they have in tables."""
        return lines_of(self.records, self.place)[0]

    @cached_property
    def base(self) -> Line | None:
        """The frozen source."""
        return base_of(self.lines)

    @cached_property
    def targets(self) -> list[str]:
        """As they appear."""
        return list(dict.fromkeys(map(target_of, self.records)))

    @cached_property
    def metric(self) -> Metric:
        """Dice where there are masks, else accuracy."""
        return METRICS["dice" if any("dice" in record["results"] for record in self.records) else "accuracy"]

    @cached_property
    def shown(self) -> list[Line]:
        """Its rows but for those that only try values of a hyper-parameter: these have a figure of their own."""
        swept = [line for sweep in sweeps(self.lines) for line in sweep.lines]
        usual = {method: usual_of([line for line in swept if line.method == method]) for method in _methods(swept)}
        return [line for line in self.lines if line not in swept or line is usual[line.method]]

    @cached_property
    def adapted(self) -> Line | None:
        """What is put beside the source: TSD, else the row with the best mean over the most targets."""
        others = [line for line in self.shown if line.method != "source" and line.select != "oracle"]
        if own := [line for line in others if line.method == "tsd"]:
            return min(own, key=lambda line: (line.guard, line.select != "default", len(line.label)))
        return max(others, key=self._rank, default=None)

    def _rank(self, line: Line) -> tuple[int, float]:
        values = [list(line.values(target, self.metric).values()) for target in self.targets]
        means = [sum(some) / len(some) for some in values if some]
        return len(means), sum(means) / len(means) if means else 0.0

    def pairs(self, line: Line, target: str) -> dict[Run, tuple[Record, Record]]:
        """The source's record and the row's, on the same stream, by seed."""
        theirs = self.base.runs.get(target, {}) if self.base else {}
        return {run: (theirs[run], record) for run, record in line.runs.get(target, {}).items() if run in theirs}

    @property
    def setting(self) -> str:
        """In a sentence: what all its runs share and a reader would ask for first."""
        settings = self.records[0]["settings"]
        words = [f"Network {settings.get('network')}", f"{settings.get('stream')} stream"]
        alike = len({record["settings"].get("batch") for record in self.records}) == 1
        words += [f"batches of {settings.get('batch')}"] if alike else []
        words += [f"disturbed by {settings['disturb']}"] if settings.get("disturb") else []
        words += [f"run through {settings['repeat']} times"] if settings.get("repeat", 1) > 1 else []
        return f"{', '.join(words)}."

    @property
    def seeds(self) -> str:
        """In a sentence: its seeds."""
        seeds = in_order(record["settings"].get("seed") for record in self.records)
        return f"Seed{'s' * (len(seeds) > 1)}: {', '.join(seeds)}."


@dataclass(frozen=True)
class Attempts:
    """Rows of a method that differ in one hyper-parameter alone."""

    method: str
    parameter: str
    lines: tuple[Line, ...]
    rest: dict[str, Any]


def groups(records: Iterable[Record], *, apart: Collection[str] = ()) -> list[Group]:
    """The groups of finished runs. Settings named in `apart` may differ inside a group; its place has them, too."""
    latest: dict[Any, Record] = {record.get("id", f"#{i}"): record for i, record in enumerate(records)}
    found: dict[str, list[Record]] = {}
    for record in filter(done, latest.values()):
        alike = {name: value for name, value in shared(record).items() if name not in apart}
        found.setdefault(key_of(alike), []).append(record)
    knobs = [_flat(some[0], apart) for some in found.values()]
    place = target_of if not apart else lambda r: (target_of(r), *(r["settings"].get(name) for name in apart))
    made: list[Group] = []
    for title, some in zip(_titles(knobs), found.values(), strict=True):
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower())[:60].strip("-") or "runs"
        taken = sum(re.fullmatch(rf"{slug}(-\d+)?", group.name) is not None for group in made)
        made.append(Group(title, f"{slug}-{taken + 1}" if taken else slug, tuple(some), place))
    return made


def closer(records: Iterable[Record]) -> list[Group]:
    """The groups to look at image by image: of those that differ in batch size alone, the one with most rows.

    Of equals it is the one with the largest batches.
    """
    best: dict[str, Group] = {}
    for group in groups(records):
        key = key_of({name: value for name, value in shared(group.records[0]).items() if name != "batch"})
        best[key] = max(best.get(key, group), group, key=_weight)
    return list(best.values())


def _weight(group: Group) -> tuple[int, int]:
    return len(group.lines), group.records[0]["settings"].get("batch") or 0


def sweeps(lines: Sequence[Line]) -> list[Attempts]:
    """Rows alike in all but one hyper-parameter, of which there are three values or more."""
    found: dict[str, list[Line]] = {}
    what: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for line in lines:
        for name in line.hyper if line.select == "default" else ():
            rest = {other: value for other, value in line.hyper.items() if other != name}
            key = key_of([line.method, name, line.guard, rest])
            found.setdefault(key, []).append(line)
            what[key] = line.method, name, rest
    return [
        Attempts(method, name, tuple(some), rest)
        for key, some in found.items()
        for method, name, rest in [what[key]]
        if len(some) >= VALUES
    ]


def usual_of(lines: Sequence[Line]) -> Line:
    """The row whose label says least: it has the values that most rows have."""
    return min(lines, key=lambda line: len(line.label))


def _methods(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.method for line in lines))


def _flat(record: Record, apart: Collection[str]) -> dict[str, Any]:
    """The settings of a group, those of source training among them, in the order to name them."""
    settings = {name: value for name, value in shared(record).items() if name not in apart}
    source = {f"source {name}": value for name, value in settings.pop("source").items()}
    first = {name: settings[name] for name in ("dataset", *ORDER) if name in settings}
    return first | settings | source


def _titles(knobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The dataset, with as few settings more as tell all groups apart; one that is off says nothing."""
    titles = [str(each.get("dataset")) for each in knobs]
    for name in dict.fromkeys(name for each in knobs for name in each):
        for title in dict.fromkeys(titles):
            same = [i for i, other in enumerate(titles) if other == title]
            if len({key_of(knobs[i].get(name)) for i in same}) > 1:
                for i in same:
                    titles[i] += _say(name, knobs[i].get(name))
    return [f"{title} ({n + 1})" if (n := titles[:i].count(title)) else title for i, title in enumerate(titles)]


def _say(name: str, value: Any) -> str:
    if value in (None, "", False) or value == {}:
        return ""
    if isinstance(value, Mapping):
        return "".join(_say(str(key), each) for key, each in value.items())
    said = f"{value} stream" if name == "stream" else str(value) if name == "network" else f"{name} {value}"
    return f", {said}"
