"""Tables and heat map of stress tests: methods × scenarios, with the difference from the frozen source."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.report.metrics import Metric
from trueup.report.runs import Record, is_finished, json_key, metric_of, seeds_text, target_of
from trueup.report.tables import WITHIN, Cell, Column, Row, Table, caveats, mark_best, mean_of
from trueup.report.variants import Variant, source_variant, variant_notes, variants_of

WITHIN_STRESS = (*WITHIN, "stream", "stream_options", "batch", "limit", "repeat", "disturb")
OF_SOURCE = ("algorithm", "iterations", "size", "multilabel")  # training settings that tell sources apart
CLIP = 30.0  # points; colours saturate beyond
COLOURS = "RdBu"  # distinct with red-green colour blindness
GAP = 0.3  # of a cell, before the last column
Name = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class StressCell:
    """A method in a scenario: means over runs (a target and a seed each), and the worst run."""

    mean: float
    runs: int
    difference: float | None = None  # from the frozen source in the same runs; None for the source itself
    lowest: float | None = None  # the difference of the worst run
    where: str = ""
    """Target and seed of the worst run."""


@dataclass(frozen=True)
class StressRow:
    """A method in all scenarios; a cell is None where runs are missing."""

    label: str
    method: str
    select: str
    cells: tuple[StressCell | None, ...]

    @property
    def worst(self) -> int | None:
        """Index of the scenario with the lowest mean difference from the source."""
        found = {i: c.difference for i, c in enumerate(self.cells) if c is not None and c.difference is not None}
        return min(found, key=found.__getitem__, default=None)


@dataclass(frozen=True)
class StressTest:
    """Results of `trueup stress` on one dataset with one network."""

    title: str
    caption: str
    metric: Metric
    scenarios: tuple[str, ...]
    rows: tuple[StressRow, ...]
    notes: tuple[str, ...]

    def tables(self) -> list[Table]:
        """Make three tables: the metric, its difference from the source, and that of the worst run."""
        return [
            self._table(f"{self.metric.title}, higher is better", lambda cell: cell.mean, sign="", notes=self.notes),
            self._table("difference from source in points, mean over runs", lambda cell: cell.difference),
            self._table("difference from source in points, worst single run", lambda cell: cell.lowest),
        ]

    def _table(
        self, what: str, of: Callable[[StressCell], float | None], *, sign: str = "+", notes: Sequence[str] = ()
    ) -> Table:
        columns = [Column(name, self.metric, sign) for name in self.scenarios] + [Column("worst", self.metric, "+")]
        rows = []
        for row in self.rows:
            found = [(cell, of(cell)) if cell else (None, None) for cell in row.cells]
            cells = [Cell(value, None, cell.runs) if cell and value is not None else None for cell, value in found]
            rows.append(Row(row.label, row.method, row.select, (*cells, _worst(row, cells, sign))))
        for at, column in enumerate(columns):
            mark_best(rows, at, column)
        return Table(f"{self.title}: {what}", self.caption, self.metric, tuple(columns), tuple(rows), tuple(notes))


def _worst(row: StressRow, cells: Sequence[Cell | None], sign: str) -> Cell | None:
    """Return the lowest difference of a row: of the differences it shows, else of the mean differences."""
    if sign:
        return min((cell for cell in cells if cell is not None), key=lambda cell: cell.mean, default=None)
    cell = None if row.worst is None else row.cells[row.worst]
    return None if cell is None or cell.difference is None else Cell(cell.difference, None, cell.runs)


def stress_tests(
    records: Iterable[Record], scenario: Name, *, order: Sequence[str] = (), label: Name = lambda settings: ""
) -> list[StressTest]:
    """Make one test per dataset and network; `scenario` and `label` name scenarios and rows from a run's settings."""
    groups: dict[str, list[Record]] = {}
    for record in {record["id"]: record for record in records}.values():
        settings = {name: value for name, value in record["settings"].items() if name not in WITHIN_STRESS}
        source = settings.pop("source", None) or {}
        # Checkpoint files may differ by target and seed.
        settings["training"] = {name: source[name] for name in OF_SOURCE if name in source}
        groups.setdefault(json_key(settings), []).append(record)
    return [_test(group, scenario, order, label) for group in groups.values() if any(map(is_finished, group))]


def _test(group: Sequence[Record], scenario: Name, order: Sequence[str], label: Name) -> StressTest:
    seen = dict.fromkeys(scenario(record["settings"]) for record in group)
    scenarios = [*(name for name in order if name in seen), *(name for name in seen if name not in order)]
    finished = [record for record in group if is_finished(record)]
    metric = metric_of(finished)
    variants, repeated = variants_of(finished, lambda record: (scenario(record["settings"]), target_of(record)))
    renamed = _rename(variants, label)
    base = source_variant(variants)
    cells = {v.label: tuple(_cell(v, base, name, metric) for name in scenarios) for v in variants}
    rows = [StressRow(v.label, v.method, v.select, cells[v.label]) for v in variants]
    refused = {variant.label: sum(r["results"].get("refused", 0) for r in variant.records) for variant in variants}
    counts = ", ".join(f"{name} {count}" for name, count in refused.items() if count)
    failed = [record["settings"] for record in group if not is_finished(record)]
    names = dict.fromkeys(f"{each['method']} in {scenario(each)}" for each in failed)
    words = _verdicts(rows, scenarios, metric)
    words += [f"refused batches, counted as wrong: {counts}"] if counts else []
    words += [f"failed runs ({len(failed)}): {', '.join(names)}"] if failed else []
    words += [f"{name} is {label}" for name, label in renamed.items()]
    words += variant_notes([variant for variant in variants if variant.label not in renamed])
    alone = "no differences: there are no runs of source" if base is None else ""
    title = f"{group[0]['settings'].get('dataset')}, {group[0]['settings'].get('network')}"
    notes = tuple(filter(None, (*words, alone, *caveats(group, repeated))))
    return StressTest(title, _caption(finished), metric, tuple(scenarios), tuple(rows), notes)


def _cell(variant: Variant, base: Variant | None, scenario: str, metric: Metric) -> StressCell | None:
    places = [place for place in variant.runs if place[0] == scenario]
    mine = {(place[1], run): v for place in places for run, v in variant.values(place, metric).items()}
    if not mine:
        return None
    theirs = {}
    if base is not None and base is not variant:
        theirs = {(place[1], run): v for place in places for run, v in base.values(place, metric).items()}
    gaps = {at: mine[at] - theirs[at] for at in mine if at in theirs}
    mean = mean_of([*mine.values()])
    if not gaps:
        return StressCell(mean, len(mine))
    target, (seed, _) = low = min(gaps, key=gaps.__getitem__)
    return StressCell(mean, len(mine), mean_of([*gaps.values()]), gaps[low], f"{target}, seed {seed}")


def _verdicts(rows: Sequence[StressRow], scenarios: Sequence[str], metric: Metric) -> list[str]:
    """Name each method's worst scenario, and its worst run if there are several."""
    words = []
    for row in rows:
        cells = {scenarios[i]: cell for i, cell in enumerate(row.cells) if cell is not None and cell.lowest is not None}
        if row.worst is None:
            continue
        mean = cells[scenarios[row.worst]].difference or 0.0
        words.append(f"{row.label}: worst in {scenarios[row.worst]}, {metric.text(mean, '+')} points")
        if any(cell.runs > 1 for cell in cells.values()):
            name, low = min(cells.items(), key=lambda item: item[1].lowest or 0.0)
            words[-1] += f"; worst single run {metric.text(low.lowest or 0.0, '+')} ({name}, {low.where})"
    return words


def _rename(variants: Sequence[Variant], label: Name) -> dict[str, str]:
    """Give variants their own names if these are unique; return replaced labels of methods with several variants."""
    names = [label(variant.records[0]["settings"]) for variant in variants]
    methods = [variant.method for variant in variants]
    replaced = {}
    for variant, name in zip(variants, names, strict=True):
        if name and names.count(name) == 1:
            if methods.count(variant.method) > 1:
                replaced[name] = variant.label
            variant.label = name
    return replaced


def _caption(records: Sequence[Record]) -> str:
    targets = list(dict.fromkeys(target_of(r) for r in records if "+" not in target_of(r)))
    return (
        f"Mean over runs: target{'s' * (len(targets) != 1)} {', '.join(targets) or 'joined'}; "
        f"{seeds_text(records)}. "
        "Differences are from the frozen source model in the same scenario, target and seed; "
        "worst: the lowest of the row."
    )


def heatmap(test: StressTest, path: Path) -> list[Path]:
    """Write a stress test as PNG and SVG, and return the files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = len(test.rows), len(test.scenarios)
    label = max(len(row.label) for row in test.rows)
    wide, high = 0.52 * (columns + 1 + GAP) + 0.085 * label + 1.1, 0.36 * rows + 2.2
    figure: Any = Figure(figsize=(max(wide, 7.0), high), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    for y, row in enumerate(test.rows):
        for x, cell in enumerate(row.cells):
            text = "–" if cell is None else test.metric.text(cell.mean)
            _draw_cell(axis, x, y, text, None if cell is None else cell.difference, bold=x == row.worst)
        worst = None if row.worst is None else row.cells[row.worst]
        difference = None if worst is None else worst.difference
        text = "" if difference is None else test.metric.text(difference, "+").replace("-", "−")
        _draw_cell(axis, columns + GAP, y, text, difference, bold=True)
    axis.set(xlim=(-0.5, columns + GAP + 0.5), ylim=(rows - 0.5, -0.5))
    axis.set_yticks(range(rows), [row.label for row in test.rows], fontsize=9)
    axis.set_xticks([*range(columns), columns + GAP], [*test.scenarios, "worst"], fontsize=9)
    axis.tick_params(length=0, top=False, bottom=False, labeltop=True, labelbottom=False)
    for text in axis.get_xticklabels():
        text.set(rotation=40, ha="left", rotation_mode="anchor")
    axis.spines[:].set_visible(False)
    title = f"{test.title}: {test.metric.unit} under stress"
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    bar = figure.colorbar(_scale(), ax=axis, fraction=0.025, pad=0.015, extend="both", aspect=25)
    bar.set_label("difference from source, points", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    figure.supxlabel(_legend(test, int(figure.get_figwidth() * 15.5)), fontsize=8, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path, path.with_suffix(".svg")]
    for file in files:
        figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _scale() -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(-CLIP, CLIP), COLOURS)


def _draw_cell(axis: Any, x: float, y: int, text: str, difference: float | None, *, bold: bool = False) -> None:
    """Draw a square in the colour of a difference, with black or white text, whichever has more contrast."""
    from matplotlib.patches import Rectangle

    grey = 1.0 if text in ("–", "") else 0.93
    face = (grey, grey, grey, 1.0) if difference is None else tuple(_scale().to_rgba(100 * difference))
    axis.add_patch(Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, facecolor=face, linewidth=0))
    light = 0.2126 * face[0] + 0.7152 * face[1] + 0.0722 * face[2]
    colour, weight = "black" if light > 0.5 else "white", "bold" if bold else "normal"
    axis.text(x, y, text, ha="center", va="center", fontsize=8, color=colour, fontweight=weight)


def _legend(test: StressTest, width: int) -> str:
    words = (
        f"Cells: {test.metric.title}; – is missing. Colour: difference from the frozen source in the same scenario, "
        f"target and seed, in points (beyond ±{CLIP:.0f} it stays the same): blue helps, red harms, grey is the source "
        "itself. Bold: the scenario where a method falls lowest below the source, or gains least; the last column says "
        f"by how much. {test.caption.partition('. ')[0]}."
    )
    return "\n".join(textwrap.wrap(words, width))
