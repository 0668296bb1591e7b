"""Groups of runs that may stand in one figure, their traces, and the variants that a figure shows."""

import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.report.figure_spec import FigureSpec, Panel
from trueup.report.metrics import Metric
from trueup.report.runs import Record, RunKey, is_finished, json_key, latest_runs, metric_of, seeds_text, target_of
from trueup.report.tables import group_by_settings, mean_of, shared_settings
from trueup.report.variants import Variant, source_variant, variants_of

Trace = Mapping[str, NDArray[Any]]
"""The `.npz` file of a run, with one entry per image of its stream."""
TraceLookup = Callable[[Record], Trace | None]
Figures = Iterator[FigureSpec]

ORDER = ("network", "stream", "stream_options", "batch", "disturb", "repeat", "limit", "reset")  # named first in titles
LARGEST = 2**28  # bytes of all arrays of a trace; the library writes no larger file
SWEPT = 3  # values of a hyper-parameter that make a sweep


class Traces:
    """The traces below a folder of records, each read on demand, without pickle."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        root = folder if folder.is_dir() else folder.parent
        self.files = {path.stem: path for path in sorted(root.rglob("traces/*.npz"))}

    def __call__(self, record: Record) -> Trace | None:
        """Return the trace of a run; None if it has none, or a damaged one."""
        path = self.files.get(str(record.get("id")))
        if path is None or "trace" not in record:
            return None
        try:
            with zipfile.ZipFile(path) as archive:
                if sum(member.file_size for member in archive.infolist()) > LARGEST:
                    return None
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (Exception, MemoryError):  # a damaged file fails in many ways, and only its figures are lost
            return None


@dataclass(frozen=True)
class Group:
    """Finished runs that share every setting but method, hyper-parameters, target and seed."""

    title: str  # the dataset, and the settings that differ from other groups
    name: str
    records: tuple[Record, ...]
    place: Callable[[Record], Any] = field(default=target_of)

    @cached_property
    def variants(self) -> list[Variant]:
        """All variants, labelled as in tables."""
        return variants_of(self.records, self.place)[0]

    @cached_property
    def base(self) -> Variant | None:
        """The frozen source."""
        return source_variant(self.variants)

    @cached_property
    def targets(self) -> list[str]:
        """Targets in the order of the records."""
        return list(dict.fromkeys(map(target_of, self.records)))

    @cached_property
    def metric(self) -> Metric:
        """Dice for masks, else accuracy."""
        return metric_of(self.records)

    @cached_property
    def shown(self) -> list[Variant]:
        """Variants without those that only sweep a hyper-parameter, which have their own figure."""
        swept = [variant for sweep in hyper_sweeps(self.variants) for variant in sweep.variants]
        shortest: dict[str, Variant] = {}  # the label of the most common values is the shortest
        for variant in swept:
            best = shortest.setdefault(variant.method, variant)
            shortest[variant.method] = min(best, variant, key=lambda each: len(each.label))
        return [variant for variant in self.variants if variant not in swept or variant is shortest[variant.method]]

    @cached_property
    def adapted(self) -> Variant | None:
        """The variant to set beside the source: TSD, else the best mean over the most targets."""
        others = [variant for variant in self.shown if variant.method != "source" and variant.select != "oracle"]
        if own := [variant for variant in others if variant.method == "tsd"]:
            return min(own, key=lambda variant: (variant.guard, variant.select != "default", len(variant.label)))
        return max(others, key=self._rank, default=None)

    def _rank(self, variant: Variant) -> tuple[int, float]:
        values = [list(variant.values(target, self.metric).values()) for target in self.targets]
        means = [mean_of(some) for some in values if some]
        return len(means), mean_of(means) if means else 0.0

    @property
    def before_after(self) -> tuple[str, str]:
        """Titles of panels of the source and of the variant beside it."""
        return f"before: {self.base and self.base.label}", f"after: {self.adapted and self.adapted.label}"

    def pairs(self, variant: Variant, target: str) -> dict[RunKey, tuple[Record, Record]]:
        """Return the source's record and the variant's on the same stream, by seed."""
        theirs = self.base.runs.get(target, {}) if self.base else {}
        return {run: (theirs[run], record) for run, record in variant.runs.get(target, {}).items() if run in theirs}

    def traced_pair(
        self, target: str, trace: TraceLookup, needs: Collection[str], images: str
    ) -> tuple[RunKey, Trace, Trace] | None:
        """Return both models' traces of the first seed with the arrays in `needs` and equal `images`, at least one."""
        pairs = self.pairs(self.adapted, target) if self.adapted else {}
        for run, (source, adapted) in sorted(pairs.items(), key=lambda item: str(item[0])):
            before, after = trace(source), trace(adapted)
            if before is None or after is None or any(name not in t for name in needs for t in (before, after)):
                continue
            if len(before[images]) and np.array_equal(before[images], after[images]):
                return run, before, after
        return None

    def figure(
        self, name: str, title: str, caption: Iterable[str], panels: Iterable[Panel], columns: int = 2
    ) -> FigureSpec:
        """Make a figure of the group, whose name ends with the group's, from the sentences of its caption."""
        text = " ".join(filter(None, caption))
        return FigureSpec(f"{name}-{self.name}", f"{self.title}: {title}", text, tuple(panels), columns)

    @property
    def setting(self) -> str:
        """A sentence on the settings that all runs share."""
        settings = self.records[0]["settings"]
        words = [f"Network {settings.get('network')}", f"{settings.get('stream')} stream"]
        alike = len({record["settings"].get("batch") for record in self.records}) == 1
        words += [f"batches of {settings.get('batch')}"] if alike else []
        words += [f"disturbed by {settings['disturb']}"] if settings.get("disturb") else []
        words += [f"run through {settings['repeat']} times"] if settings.get("repeat", 1) > 1 else []
        return f"{', '.join(words)}."

    @property
    def seeds(self) -> str:
        """A sentence that lists the seeds."""
        return f"S{seeds_text(self.records)[1:].replace(' ', ': ', 1)}."


@dataclass(frozen=True)
class HyperSweep:
    """Variants of a method that differ in one hyper-parameter."""

    method: str
    parameter: str
    variants: tuple[Variant, ...]
    rest: dict[str, Any]


def group_runs(records: Iterable[Record], *, apart: Collection[str] = ()) -> list[Group]:
    """Group finished runs. Settings named in `apart` may differ inside a group, and are part of the place."""
    found = group_by_settings(filter(is_finished, latest_runs(records)), apart)
    settings = []
    for some in found:
        shared = shared_settings(some[0], apart)
        source = {f"source {name}": value for name, value in shared.pop("source").items()}
        # In the order of naming.
        settings.append({name: shared[name] for name in ("dataset", *ORDER) if name in shared} | shared | source)
    place = target_of if not apart else lambda r: (target_of(r), *(r["settings"].get(name) for name in apart))
    groups: list[Group] = []
    for title, some in zip(_titles(settings), found, strict=True):
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower())[:60].strip("-") or "runs"
        taken = sum(re.fullmatch(rf"{slug}(-\d+)?", group.name) is not None for group in groups)
        groups.append(Group(title, f"{slug}-{taken + 1}" if taken else slug, tuple(some), place))
    return groups


def detail_groups(records: Iterable[Record]) -> list[Group]:
    """Pick, of groups that differ only in batch size, the one with most variants, then with the largest batches."""
    best: dict[str, tuple[tuple[int, int], Group]] = {}
    for group in group_runs(records):
        key = json_key(shared_settings(group.records[0], ("batch",)))
        weight = len(group.variants), group.records[0]["settings"].get("batch") or 0
        best[key] = max(best.get(key, (weight, group)), (weight, group), key=lambda each: each[0])
    return [group for _, group in best.values()]


def hyper_sweeps(variants: Sequence[Variant]) -> list[HyperSweep]:
    """Find variants that are alike in all but one hyper-parameter, with at least SWEPT values of it."""
    found: dict[str, HyperSweep] = {}
    for variant in variants:
        for name in variant.hyper if variant.select == "default" else ():
            rest = {other: value for other, value in variant.hyper.items() if other != name}
            key = json_key([variant.method, name, variant.guard, rest])
            before = found[key].variants if key in found else ()
            found[key] = HyperSweep(variant.method, name, (*before, variant), rest)
    return [sweep for sweep in found.values() if len(sweep.variants) >= SWEPT]


def _titles(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the datasets, with as few further settings as tell all groups apart."""
    titles = [str(each.get("dataset")) for each in groups]
    for name in dict.fromkeys(name for each in groups for name in each):
        for title in dict.fromkeys(titles):
            same = [i for i, other in enumerate(titles) if other == title]
            if len({json_key(groups[i].get(name)) for i in same}) > 1:
                for i in same:
                    titles[i] += _in_words(name, groups[i].get(name))
    return [f"{title} ({n + 1})" if (n := titles[:i].count(title)) else title for i, title in enumerate(titles)]


def _in_words(name: str, value: Any) -> str:
    if value in (None, "", False) or value == {}:
        return ""
    if isinstance(value, Mapping):
        return "".join(_in_words(str(key), each) for key, each in value.items())
    text = f"{value} stream" if name == "stream" else str(value) if name == "network" else f"{name} {value}"
    return f", {text}"
