"""Variants of methods: the runs behind one row of a table, and the label of that row."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trueup.report.metrics import Metric, check_name
from trueup.report.runs import Record, RunKey, json_key, run_key

SELECT = {"default": "", "source": "searched", "oracle": "oracle"}  # a selection, and its word in a label


@dataclass
class Variant:
    """Runs of a method with the same settings, by place (in most tables the target) and seed."""

    method: str
    select: str
    hyper: dict[str, Any]
    guard: bool = False
    code: str = ""
    """Hash of the file of a method that is not part of the library."""
    label: str = ""
    runs: dict[Any, dict[RunKey, Record]] = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        """All records of the variant."""
        return [record for by_seed in self.runs.values() for record in by_seed.values()]

    def values(self, place: Any, metric: Metric) -> dict[RunKey, float]:
        """Return the metric by seed; a record without it counts as a missing run, not as zero."""
        found = {run: (r.get(metric.section) or {}).get(metric.name) for run, r in self.runs.get(place, {}).items()}
        return {run: float(value) for run, value in found.items() if value is not None}

    def complete(self, places: Sequence[Any], metric: Metric) -> dict[RunKey, list[float]]:
        """Return the metric in all places, for the seeds that have every place."""
        columns = [self.values(place, metric) for place in places]
        return {run: [c[run] for c in columns] for run in columns[0] if all(run in c for c in columns)}


def variants_of(records: Sequence[Record], place: Callable[[Record], Any]) -> tuple[list[Variant], int]:
    """Return the variants, `source` first and those of a method together, and the number of repeated runs."""
    variants: dict[str, Variant] = {}
    repeated = 0
    for record in records:
        settings = record["settings"]
        select, guard = check_name(settings.get("select", "default"), SELECT, "select"), bool(settings.get("guard"))
        # Searched values may differ from run to run, and do not make another variant.
        free = record.get("chosen") or {} if select != "default" else {}
        hyper = {name: value for name, value in settings.get("hyper", {}).items() if name not in free}
        code = (settings.get("code") or {}).get("method", "")
        variant = Variant(settings["method"], select, hyper, guard, code)
        variant = variants.setdefault(json_key([variant.method, select, hyper, guard, code]), variant)
        by_seed = variant.runs.setdefault(place(record), {})
        repeated += run_key(record) in by_seed
        by_seed[run_key(record)] = record
    methods = list(dict.fromkeys(["source", *(variant.method for variant in variants.values())]))
    for variant in variants.values():
        variant.label = _label(variant, [other for other in variants.values() if other.method == variant.method])
    return sorted(variants.values(), key=lambda variant: methods.index(variant.method)), repeated


def source_variant(variants: Sequence[Variant]) -> Variant | None:
    """Return the plainest variant of the frozen source model."""
    found = [variant for variant in variants if variant.method == "source"]
    return min(found, key=lambda variant: (list(SELECT).index(variant.select), variant.guard), default=None)


def _label(variant: Variant, family: Sequence[Variant]) -> str:
    """Return the method, with what differs from the most common values among its variants."""
    words = []
    for name, value in variant.hyper.items():
        # Searches over different hyper-parameters fix different ones, so compare within one kind of selection.
        lacking = any(name not in other.hyper for other in family if other.select == variant.select)
        if lacking or json_key(value) != json_key(_most_common(name, family)):
            words.append(f"{name}={json.dumps(value, ensure_ascii=False)}")
    words += ["guard"] if variant.guard else []
    words += [f"code {variant.code[-6:]}"] if len({other.code for other in family}) > 1 else []
    words += [SELECT[variant.select]] if SELECT[variant.select] else []
    return f"{variant.method} ({', '.join(words)})" if words else variant.method


def _most_common(name: str, family: Sequence[Variant]) -> Any:
    """Return the most common value of a hyper-parameter; the first one on a tie."""
    values = [variant.hyper[name] for variant in family if name in variant.hyper]
    return max(values, key=lambda value: [json_key(other) for other in values].count(json_key(value)))


def variant_notes(variants: Sequence[Variant]) -> list[str]:
    """Return, for each method with several variants, the values that labels leave out."""
    notes = []
    for method in dict.fromkeys(variant.method for variant in variants):
        family = [variant for variant in variants if variant.method == method]
        names = [n for n in family[0].hyper if len({json_key(v.hyper[n]) for v in family if n in v.hyper}) > 1]
        common = ", ".join(f"{name}={json.dumps(_most_common(name, family), ensure_ascii=False)}" for name in names)
        notes += [f"{method}, unless its label says otherwise: {common}"] if names else []
    return notes
