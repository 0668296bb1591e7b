"""Records of one method with the same settings make a row: how they are gathered, and what the row is called."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trueup.report.metrics import Metric, known

Record = Mapping[str, Any]
Run = tuple[Any, Any]  # the seed, and that of the source training where the recipe has one of its own

SELECT = {"default": "", "source": "searched", "oracle": "oracle"}  # how a row's label says it


@dataclass
class Line:
    """The runs of one row, by place (in most tables the target) and seed."""

    method: str
    select: str
    hyper: dict[str, Any]
    guard: bool = False
    code: str = ""
    """Of a method that is not the library's: the hash of its file."""
    label: str = ""
    runs: dict[Any, dict[Run, Record]] = field(default_factory=dict)

    def values(self, place: Any, metric: Metric) -> dict[Run, float]:
        """The metric by seed; a record without it is a missing run, not a zero."""
        found = {run: (r.get(metric.section) or {}).get(metric.name) for run, r in self.runs.get(place, {}).items()}
        return {run: float(value) for run, value in found.items() if value is not None}

    def complete(self, places: Sequence[Any], metric: Metric) -> dict[Run, list[float]]:
        """The metric in all places, for seeds that have them all."""
        columns = [self.values(place, metric) for place in places]
        return {run: [c[run] for c in columns] for run in columns[0] if all(run in c for c in columns)}


def lines_of(records: Sequence[Record], place: Callable[[Record], Any]) -> tuple[list[Line], int]:
    """The rows-to-be, `source` first, variants of a method together; and how many runs were there twice."""
    lines: dict[str, Line] = {}
    repeated = 0
    for record in records:
        settings = record["settings"]
        select, guard = known(settings.get("select", "default"), SELECT, "select"), bool(settings.get("guard"))
        # What a search chose may differ from run to run; it does not make another row.
        free = record.get("chosen") or {} if select != "default" else {}
        hyper = {name: value for name, value in settings.get("hyper", {}).items() if name not in free}
        code = (settings.get("code") or {}).get("method", "")
        line = Line(settings["method"], select, hyper, guard, code)
        line = lines.setdefault(key_of([line.method, select, hyper, guard, code]), line)
        cell = line.runs.setdefault(place(record), {})
        repeated += run_of(record) in cell
        cell[run_of(record)] = record
    methods = list(dict.fromkeys(["source", *(line.method for line in lines.values())]))
    for line in lines.values():
        line.label = _label(line, [other for other in lines.values() if other.method == line.method])
    return sorted(lines.values(), key=lambda line: methods.index(line.method)), repeated


def base_of(lines: Sequence[Line]) -> Line | None:
    """The frozen source model, as plain as it is there."""
    found = [line for line in lines if line.method == "source"]
    return min(found, key=lambda line: (list(SELECT).index(line.select), line.guard), default=None)


def _label(line: Line, family: Sequence[Line]) -> str:
    """The method, with what sets this row apart from the usual one of its family."""
    words = []
    for name, value in line.hyper.items():
        # A search over other hyper-parameters leaves others fixed; only its own kind can be told apart by that.
        lacking = any(name not in other.hyper for other in family if other.select == line.select)
        if lacking or key_of(value) != key_of(_usual(name, family)):
            words.append(f"{name}={json.dumps(value, ensure_ascii=False)}")
    words += ["guard"] if line.guard else []
    words += [f"code {line.code[-6:]}"] if len({other.code for other in family}) > 1 else []
    words += [SELECT[line.select]] if SELECT[line.select] else []
    return f"{line.method} ({', '.join(words)})" if words else line.method


def _usual(name: str, family: Sequence[Line]) -> Any:
    """The value of a hyper-parameter that most rows of a method have; of equals the first."""
    values = [line.hyper[name] for line in family if name in line.hyper]
    return max(values, key=lambda value: [key_of(other) for other in values].count(key_of(value)))


def variants(lines: Sequence[Line]) -> list[str]:
    """For each method with several rows: what a row has where its label does not say."""
    notes = []
    for method in dict.fromkeys(line.method for line in lines):
        family = [line for line in lines if line.method == method]
        names = [n for n in family[0].hyper if len({key_of(a.hyper[n]) for a in family if n in a.hyper}) > 1]
        usual = ", ".join(f"{name}={json.dumps(_usual(name, family), ensure_ascii=False)}" for name in names)
        notes += [f"{method}, where its label says nothing else: {usual}"] if names else []
    return notes


def done(record: Record) -> bool:
    """Whether the run came to its end."""
    return bool(record.get("results"))


def target_of(record: Record) -> str:
    """The target of a run."""
    return str(record["settings"].get("target"))


def run_of(record: Record) -> Run:
    """What tells runs of a row on one target apart."""
    settings = record["settings"]
    return settings.get("seed"), (settings.get("source") or {}).get("seed")


def key_of(value: Any) -> str:
    """Equal for equal values."""
    return json.dumps(value, sort_keys=True)
