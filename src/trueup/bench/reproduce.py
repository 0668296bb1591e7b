"""The paper's tables and figures by name: their recipes, runs, and the runs of each cell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trueup.bench.records import Entry
from trueup.bench.settings import Open, Run, Sweep, check_known, validate_settings
from trueup.data.cards import CARDS, get_card
from trueup.data.datasets import Dataset, dataset_from_card, open_dataset
from trueup.data.pictures import AS_STORED, Reading

METHODS = {
    "ERM": "source", "BN": "bn", "Tent": "tent", "PL": "pl", "SHOT-IM": "shot-im", "T3A": "t3a",
    "ETA": {"eta": {"redundancy": 0.05}}, "LAME": "lame", "TSD": "tsd",
}  # fmt: skip
"""The paper's names of the methods. ETA has its published threshold, which explains the paper's numbers."""
AVERAGE = "Avg"
OWN = ("metric", "of", "paper")  # keys of rows and columns that are not settings
DIGITS, DIGITS_C = "digits", "digits-c"
STAND_INS = {
    **{name: DIGITS_C if card.kind == "corruptions" else DIGITS for name, card in CARDS.items()},
    "fundus": "fundus-sim",
    "cardiac": "cardiac-sim",
    "prostate": "prostate-sim",
}
"""The embedded benchmark that replaces each dataset in a small reproduction."""
NETWORKS = {
    "resnet18": "digits-net",
    "resnet50": "digits-net",
    "resnext50_32x4d": "timm/resnext26ts",
    "timm/vit_base_patch16_224.augreg_in21k": "timm/vit_tiny_patch16_224",
    "efficientnet_b4": "timm/efficientnet_b0",
    "timm/mixer_l16_224.goog_in21k": "timm/mixer_s16_224",
}
"""The network that replaces each one in a small reproduction."""
SMALL = {"weights": "none", "select": ["default"], "seed": [0]}
FEW = ("gaussian_noise", "fog", "contrast")  # corruptions of a small reproduction


class PaperRecipe(BaseModel):
    """A table of the paper: settings of all runs, of each row and of each column; a cell combines all three."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    table: str = Field("", description="the paper's table of numbers, if it has one")
    note: str = ""
    metric: str = "accuracy"
    settings: dict[str, Any] = Field(default_factory=dict)
    rows: dict[str, dict[str, Any]] | Literal["methods", "targets"]
    columns: dict[str, dict[str, Any] | Literal["average"]] | Literal["targets", "classes"]
    figures: list[str] = Field(default_factory=list, description="figures to draw, by the start of their names")
    count: bool = Field(False, description="count images and run nothing")

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the paper's table; empty if it has none."""
        return dict(paper_tables()[self.table]) if self.table else {"columns": [], "mean": {}}

    def row_settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each row."""
        if self.rows == "methods":
            return {row: {"method": method} for row, method in METHODS.items()}
        if isinstance(self.rows, str):
            return {target: {"target": target} for target in get_card(self.settings["dataset"]).domains}
        return self.rows

    def column_settings(self) -> dict[str, dict[str, Any] | Literal["average"]]:
        """Return the settings of each column."""
        if isinstance(self.columns, dict):
            return self.columns
        targets = get_card(self.settings["dataset"]).domains
        return {**{target: {"target": target} for target in targets}, AVERAGE: "average"}


@cache
def paper_tables() -> dict[str, Any]:
    """Return the paper's tables, by name."""
    return dict(json.loads((files("trueup.paper") / "tables.json").read_text())["tables"])


@cache
def recipes() -> dict[str, PaperRecipe]:
    """Return all recipes, by name."""
    import yaml

    found = sorted((f for f in files("trueup.paper").iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return {file.name.removesuffix(".yaml"): PaperRecipe(**yaml.safe_load(file.read_text())) for file in found}


def get_recipe(name: str) -> PaperRecipe:
    """Return a recipe by its name."""
    check_known(name, recipes(), "recipe")
    return recipes()[name]


class Reproduction(Sweep):
    """The runs of a paper recipe: a sweep for each cell of its table."""

    recipe: str
    small: bool = False
    given: dict[str, Any] = Field(default_factory=dict, description="settings that override the recipe's")
    unread: bool = Field(False, description="take missing datasets as their cards describe them")

    def reading_of(self, dataset: str) -> Reading:
        """Return how recipes read pictures."""
        return AS_STORED

    def open(self, dataset: str, reading: Reading | None = None) -> Dataset:
        """Open a dataset of the recipe; a missing one from its card. Refuse one that lacks targets or classes."""
        root = self.root_of(dataset)
        if root is None and (self.unread or self.small):
            return dataset_from_card(dataset)  # an embedded dataset is opened itself
        found, expected = open_dataset(dataset, root, reading or AS_STORED), dataset_from_card(dataset)
        missing = [target for target in expected.targets if target not in found.targets]
        if missing or len(found.classes) != len(expected.classes):
            lacks = f"lacks {', '.join(missing)}" if missing else f"has {len(found.classes)} classes"
            raise ValueError(
                f"this {dataset} {lacks}, so its numbers cannot be compared with the paper's; "
                f"`trueup data check {dataset} --root DIR` lists what is missing"
            )
        return found

    def datasets(self) -> list[str]:
        """Return the names of all datasets that the recipe needs."""
        recipe = get_recipe(self.recipe)
        if recipe.count:
            name = recipe.settings["dataset"]
            return [STAND_INS[name] if self.small else name]
        return list(dict.fromkeys(settings["dataset"] for _, _, settings in self.combined()))

    def runs(self, opened: Open | None = None) -> list[Run]:
        """Return all runs, each once, row by row."""
        return list({run.digest(): run for runs in self.cells(opened).values() for run in runs}.values())

    def cells(self, opened: Open | None = None) -> dict[tuple[str, str], list[Run]]:
        """Return the runs of each cell, by row and column."""
        recipe = get_recipe(self.recipe)
        datasets = {name: (opened or self.open)(name, self.reading_of(name)) for name in self.dataset}
        made: dict[str, list[Run]] = {}
        found = {}
        for row, column, settings in () if recipe.count else self.combined():
            part = validate_settings(Sweep, settings)
            key = part.model_dump_json()
            if key not in made:
                made[key] = list(part.runs_on(datasets[part.dataset[0]]))
            found[row, column] = made[key]
        return found

    def combined(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield row, column and settings of each cell that has runs."""
        recipe = get_recipe(self.recipe)
        for row, own in recipe.row_settings().items():
            for column, other in recipe.column_settings().items():
                if other != "average":
                    yield row, column, merge_settings(recipe.settings, own, other, small=self.small, given=self.given)

    def entries(self, counted: Mapping[tuple[str, str], float] | None = None) -> dict[tuple[str, str], Entry]:
        """Return the runs of each cell with the paper's number."""
        recipe = get_recipe(self.recipe)
        rows, columns, paper = recipe.row_settings(), recipe.column_settings(), recipe.numbers
        cells, found = self.cells(), {}
        names = list(columns) if not recipe.count else paper["columns"]
        for row in [*rows, *paper.get("literature", ())]:
            paper_row = rows.get(row, {}).get("paper", row)
            for column in names:
                other = columns.get(column, {})
                mean = paper["mean"].get(paper_row, {}).get(column)
                entry = Entry(paper=mean, deviation=paper.get("std", {}).get(paper_row, {}).get(column))
                if row not in rows:
                    found[row, column] = entry
                elif other == "average":
                    found[row, column] = entry._replace(parts=tuple(c for c, v in columns.items() if v != "average"))
                elif counted is not None:
                    found[row, column] = entry._replace(counted=counted.get((row, column)))
                else:
                    of = other.get("of")
                    runs = tuple((run.seed, run.digest()) for run in cells[row, column] if of in (None, run.method))
                    found[row, column] = entry._replace(runs=runs, metric=other.get("metric", recipe.metric))
        return found

    def count(self) -> dict[tuple[str, str], float]:
        """Count the images of each class in each domain, by the names of the paper's table."""
        recipe, (name,) = get_recipe(self.recipe), self.dataset
        dataset, columns = self.open(name), recipe.numbers["columns"]
        rows = list(recipe.row_settings())
        targets = _in_turn(rows, dataset.targets) if self.small else dict(zip(rows, rows, strict=True))
        counts: dict[tuple[str, str], float] = {}
        for row, target in targets.items():
            labels = dataset.domain(target).labels
            counts |= {(row, column): float((labels == i).sum()) for i, column in enumerate(columns)}
        return counts


def merge_settings(*parts: Mapping[str, Any], small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings of a cell; a small reproduction replaces its dataset and network."""
    values: dict[str, Any] = {}
    for part in parts:
        values |= {key: {**values.get(key, {}), **v} if key == "training" else v for key, v in part.items()}
    values = {key: value for key, value in values.items() if key not in OWN}
    if small:
        values = _small(values)
    training = {**values.get("training", {}), **given.get("training", {})}
    return values | dict(given) | ({"training": training} if training else {})


def _small(values: Mapping[str, Any]) -> dict[str, Any]:
    name = values["dataset"]
    stand_in = STAND_INS[name]
    small = {**values, **SMALL, "dataset": stand_in}
    if "target" in values:
        targets = _in_turn(list(dataset_from_card(name).targets), open_dataset(stand_in).targets)
        small["target"] = targets[values["target"]]
    elif stand_in == DIGITS_C:
        small["target"] = list(FEW)
    if "network" in values:
        small["network"] = NETWORKS[values["network"]]
    if "batch" in values:
        small["batch"] = max(1, values["batch"] // 2)
    return small


def _in_turn(names: list[str], others: tuple[str, ...]) -> dict[str, str]:
    """Map names to other names in order, starting over if there are fewer."""
    return {name: name if name in others else others[i % len(others)] for i, name in enumerate(names)}


def make_reproduction(
    name: str,
    *,
    data: str | None = None,
    small: bool = False,
    given: Mapping[str, Any] | None = None,
    unread: bool = False,
) -> Reproduction:
    """Make the reproduction of a recipe; `data` holds a folder for each dataset."""
    settings = {"recipe": name, "small": small, "given": dict(given or {}), "unread": unread}
    wanted = validate_settings(Reproduction, settings)
    names, folder = wanted.datasets(), None if small or data is None else Path(data)
    roots = {n: str(found) for n in names if folder and (found := find_dataset_folder(n, folder))}
    missing = [n for n in names if n not in roots]
    if missing and not small and not unread:
        raise ValueError(
            f"{name} needs {', '.join(missing)}: give --data DIR with a folder of that name for each, or --small to "
            f"run it on the embedded benchmarks; `trueup data card {missing[0]}` says where to get the data"
        )
    return wanted.model_copy(update={"dataset": names, "root": roots or None, "weights": wanted.given.get("weights")})


def find_dataset_folder(dataset: str, data: Path) -> Path | None:
    """Find the folder of a dataset, ignoring case and punctuation: CIFAR-10-C is cifar10-c."""

    def bare(name: str) -> str:
        return "".join(c for c in name.lower() if c.isalnum())

    if not data.is_dir():
        raise ValueError(f"{data} is not a folder")
    return next((p for p in sorted(data.iterdir()) if p.is_dir() and bare(p.name) == bare(dataset)), None)
