"""Recipes: every table of the paper has one, each cell has its runs, and the paper's numbers are its own."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trueup.bench import estimate
from trueup.bench.estimate import (
    count_images,
    format_duration,
    seconds_of_run,
    seconds_of_training,
    total_seconds,
)
from trueup.bench.hparam_search import search_grid
from trueup.bench.reproduce import (
    METHODS,
    Reproduction,
    get_recipe,
    make_reproduction,
    merge_settings,
    paper_tables,
    recipes,
)
from trueup.bench.settings import Run
from trueup.bench.sweep import plan
from trueup.data.cards import CARDS
from trueup.data.datasets import dataset_from_card

NAMES = list(recipes())


def planned(name: str, **options: Any) -> Reproduction:
    return make_reproduction(name, unread=True, **options)


def cell(name: str, row: str, column: str, **options: Any) -> list[Run]:
    return planned(name, **options).cells()[row, column]


def test_every_table_of_the_paper_has_a_recipe() -> None:
    assert {recipe.table for recipe in recipes().values()} - {""} == set(paper_tables())


@pytest.mark.parametrize("name", [name for name in NAMES if get_recipe(name).table])
def test_rows_and_columns_are_the_papers(name: str) -> None:
    recipe = get_recipe(name)
    numbers = paper_tables()[recipe.table]
    theirs = {own.get("paper", row) for row, own in recipe.row_settings().items()}
    assert theirs - set(numbers["mean"]) <= {"8", "16", "32"}  # of the curve over batch sizes two points are printed
    unmatched = set(numbers["mean"]) - theirs
    both_modes = {"ERM", "BN", "Tent", "PL", "SHOT-IM", "T3A", "ETA"} if name.startswith("statistics") else set()
    assert unmatched == set(numbers.get("literature", ())) | both_modes
    if not recipe.count:
        assert list(recipe.column_settings()) == numbers["columns"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("small", [False, True])
def test_entries_hold_the_papers_numbers_and_runs(name: str, small: bool) -> None:
    recipe, wanted = get_recipe(name), planned(name, small=small)
    entries = wanted.entries(wanted.count() if recipe.count and small else {} if recipe.count else None)
    numbers = recipe.numbers
    for (row, column), entry in entries.items():
        theirs = recipe.row_settings().get(row, {}).get("paper", row)
        assert entry.paper == numbers["mean"].get(theirs, {}).get(column)
        assert entry.deviation == numbers.get("std", {}).get(theirs, {}).get(column)
    runs = {run.digest() for run in wanted.runs()}
    assert {run for entry in entries.values() for _, run in entry.runs} <= runs
    assert bool(runs) != recipe.count


def test_main_table_searches_and_covers_all_targets_and_seeds() -> None:
    runs = cell("main-resnet18", "TSD", "PACS")
    assert {(run.target, run.seed) for run in runs} == set(product(CARDS["pacs"].domains, (0, 1, 2)))
    assert {(r.method, r.network, r.weights, r.select, r.batch) for r in runs} == {
        ("tsd", "resnet18", "imagenet", "source", 128)
    }
    named = ["source", "bn", "tent", "pl", "shot-im", "t3a", "eta", "lame", "tsd"]
    assert [run.method for row in METHODS for run in cell("main-resnet50", row, "VLCS")[:1]] == named


# Written from the paper's protocol, not from the recipes.
FACTS: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("main-resnet18", "ERM", "PACS", {"network": "resnet18", "method": "source"}, {}),
    ("main-resnet50", "TSD", "DomainNet", {"network": "resnet50", "method": "tsd", "select": "source"}, {}),
    ("main-resnet50", "ETA", "PACS", {"network": "resnet50", "select": "source"}, {"redundancy": 0.05}),
    ("domainnet-resnet18", "Tent", "real", {"network": "resnet18", "target": "real", "method": "tent"}, {}),
    ("officehome-resnet50", "LAME", "Art", {"network": "resnet50", "target": "Art", "method": "lame"}, {}),
    ("vlcs-resnet50", "T3A", "SUN09", {"network": "resnet50", "target": "SUN09", "dataset": "vlcs"}, {}),
    ("backbones", "ResNeXt-50 + TSD", "PACS", {"network": "resnext50_32x4d", "method": "tsd", "select": "source"}, {}),
    ("backbones", "ResNet18 + TSD", "VLCS", {"network": "resnet18", "method": "tsd"}, {}),
    ("backbones", "ResNet50", "VLCS", {"network": "resnet50", "method": "source"}, {}),
    ("backbones", "ViT-B/16", "PACS", {"network": "timm/vit_base_patch16_224.augreg_in21k"}, {}),
    ("backbones", "EfficientNet-B4 + TSD", "OfficeHome", {"network": "efficientnet_b4", "method": "tsd"}, {}),
    ("backbones", "Mixer-L16 + TSD", "PACS", {"network": "timm/mixer_l16_224.goog_in21k", "method": "tsd"}, {}),
    ("swad-domainnet", "SWAD", "sketch", {"network": "resnet50", "method": "source", "target": "sketch"}, {}),
    ("corruptions", "SHOT-IM", "CIFAR-100-C", {"network": "resnet26-cifar", "dataset": "cifar100-c", "batch": 128}, {}),
    ("corruptions", "PL", "ImageNet-C", {"network": "resnet50", "batch": 64, "weights": "imagenet"}, {}),
    ("running-time", "BN", "OfficeHome", {"network": "resnet50", "dataset": "officehome", "batch": 128}, {}),
    ("updated-parameters", "all", "PACS", {"method": "tsd", "network": "resnet50"}, {"params": "all", "lr": 1e-4}),
    ("updated-parameters", "batch-norm affine", "memory", {"method": "tsd"}, {"params": "norm", "lr": 1e-3}),
    ("statistics-resnet18", "TSD, source statistics", "VLCS", {"network": "resnet18"}, {"norm": "source"}),
    ("statistics-resnet50", "LAME, batch statistics", "PACS", {"network": "resnet50"}, {"norm": "batch"}),
    ("segmentation", "Tent", "ACDC -> LGE", {"dataset": "cardiac", "target": "lge", "select": "default"}, {"lr": 1e-4}),
    ("segmentation", "TSD", "REFUGE -> RIM-ONE-r3", {"target": "rim-one-r3"}, {"lr": 1e-4, "neighbors": 64}),
    ("segmentation", "ERM", "MSD05 -> Promise12", {"network": "smp:deeplabv3plus/mobilenet_v2"}, {}),
    ("sensitivity", "K = 15", "PACS", {"network": "resnet50"}, {"neighbors": 15, "per_class": 100, "alignment": 0.1}),
    ("sensitivity", "M = all", "PACS", {}, {"neighbors": 3, "per_class": None, "alignment": 0.1}),
    ("sensitivity", "λ = 0.5", "PACS", {}, {"neighbors": 3, "per_class": 100, "alignment": 0.5}),
]


@pytest.mark.parametrize(("name", "row", "column", "settings", "hyper"), FACTS)
def test_cells_are_as_the_paper_says(
    name: str, row: str, column: str, settings: dict[str, Any], hyper: dict[str, Any]
) -> None:
    runs = cell(name, row, column)
    assert {run.seed for run in runs} == {0, 1, 2}
    for run in runs:
        assert {key: getattr(run, key) for key in settings} == settings
        assert {key: run.hyper[key] for key in hyper} == hyper
        assert run.batch == settings.get("batch", run.batch)
        assert run.stream == "iid"


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith(("resnet18", "resnet50"))])
def test_networks_and_searches_of_the_main_tables(name: str) -> None:
    runs = planned(name).runs()
    assert {run.network for run in runs} == {name.rpartition("-")[2]}
    assert {run.weights for run in runs} == {"imagenet"}
    searched = {run.method for run in runs if run.select == "source"}
    assert searched == {run.method for run in runs} - {"source", "bn"}  # these have nothing to search


def test_average_is_over_the_other_columns() -> None:
    entries = planned("main-resnet18").entries()
    assert entries["TSD", "Avg"].parts == ("PACS", "OfficeHome", "VLCS", "DomainNet")
    assert entries["TSD", "Avg"].runs == ()


def test_ablation_adds_one_part_after_the_other() -> None:
    rows = ["self-distillation", "+ entropy filter", "+ consistency filter", "+ MSLC"]
    hyper = [cell("ablation", row, "PACS")[0].hyper for row in rows]
    parts = [(h["per_class"], h["consistency"], h["alignment"]) for h in hyper]
    assert parts == [(None, False, 0.0), (100, False, 0.0), (100, True, 0.0), (100, True, 0.1)]


def test_swad_is_a_matter_of_training() -> None:
    plain, swad = (cell("swad-pacs", row, "photo")[0] for row in ("TSD", "SWAD + TSD"))
    assert (plain.source.algorithm, swad.source.algorithm) == ("erm", "swad")
    assert (plain.method, swad.method, swad.target) == ("tsd", "tsd", "photo")


def test_literature_has_no_runs() -> None:
    entries = planned("swad-domainnet").entries()
    assert entries["F-mix", "clipart"].paper == 75.4
    assert entries["F-mix", "clipart"].runs == ()


def test_both_modes_stand_beside_the_same_number() -> None:
    entries = planned("statistics-resnet18").entries()
    both = [entries[f"TSD, {mode} statistics", "VLCS"] for mode in ("batch", "source")]
    assert [entry.paper for entry in both] == [73.61, 73.61]
    assert both[0].runs != both[1].runs


def test_columns_may_have_a_metric_and_a_method_of_their_own() -> None:
    entries = planned("batch-size").entries()
    assert entries["128", "memory"].metric == "peak_memory_mb"
    assert entries["128", "memory"].runs == entries["128", "PACS"].runs
    assert len(entries["128", "PACS"].runs) == 12  # of the source and TSD only TSD
    assert len(planned("batch-size").cells()["128", "PACS"]) == 24


def test_corruptions_start_afresh_and_imagenet_has_no_search() -> None:
    assert {run.select for run in cell("corruptions", "TSD", "ImageNet-C")} == {"default"}
    assert {run.select for run in cell("corruptions", "TSD", "CIFAR-10-C")} == {"source"}
    assert all("+" not in run.target for run in cell("corruptions", "BN", "CIFAR-10-C"))


def test_small_stands_on_what_is_embedded() -> None:
    (run,) = cell("domainnet-resnet50", "TSD", "sketch", small=True)
    assert (run.dataset, run.target, run.network, run.weights, run.select) == (
        "digits", "type", "digits-net", "none", "default",
    )  # fmt: skip
    assert {run.dataset for run in planned("segmentation", small=True).runs()} == {
        "prostate-sim", "cardiac-sim", "fundus-sim",
    }  # fmt: skip
    assert len({run.network for run in planned("backbones", small=True).runs()}) == 5


def test_what_is_given_takes_the_place_of_the_recipes() -> None:
    given = {"seed": [4], "limit": 7, "training": {"iterations": 3}, "select": "default"}
    (run,) = cell("swad-pacs", "SWAD", "photo", given=given)
    assert (run.seed, run.limit, run.select, run.source.iterations, run.source.algorithm) == (
        4,
        7,
        "default",
        3,
        "swad",
    )


def test_settings_of_training_add_up() -> None:
    parts = [{"dataset": "pacs", "training": {"size": 64}}, {"training": {"batch": 2}, "paper": "x"}]
    assert merge_settings(*parts, small=False, given={"training": {"size": 32}}) == {
        "dataset": "pacs", "training": {"size": 32, "batch": 2},
    }  # fmt: skip


def test_labels_are_counted(tmp_path: Path) -> None:
    for domain, count in zip(CARDS["vlcs"].domains, (1, 2, 3, 1), strict=True):
        for label in CARDS["vlcs"].class_names:
            folder = tmp_path / "VLCS" / domain / label
            folder.mkdir(parents=True)
            for i in range(count + (label == "dog")):
                Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    wanted = make_reproduction("vlcs-labels", data=str(tmp_path))
    counts = wanted.count()
    assert [counts["SUN09", str(k)] for k in range(5)] == [3, 3, 3, 4, 3]
    entry = wanted.entries(counts)["SUN09", "3"]
    assert (entry.counted, entry.paper) == (4.0, 30.0)


def test_data_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    for domain in ("art_painting", "cartoon", "photo"):
        folder = tmp_path / "pacs" / domain / "dog"
        folder.mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(folder / "0.png")
    with pytest.raises(ValueError, match="this pacs lacks sketch, so its numbers cannot be compared with the paper's"):
        make_reproduction("ablation", data=str(tmp_path)).runs()
    (tmp_path / "pacs" / "sketch" / "dog").mkdir(parents=True)
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / "pacs" / "sketch" / "dog" / "0.png")
    with pytest.raises(ValueError, match="this pacs has 1 classes"):
        make_reproduction("ablation", data=str(tmp_path)).runs()


def test_missing_data_are_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "OFFICE_HOME").mkdir()
    with pytest.raises(ValueError, match=r"needs pacs, vlcs, domainnet: give --data DIR .* or --small"):
        make_reproduction("main-resnet18", data=str(tmp_path))
    with pytest.raises(ValueError, match=r"did you mean|Did you mean 'ablation'"):
        make_reproduction("ablatoin")
    with pytest.raises(ValueError, match="is not a folder"):
        make_reproduction("ablation", data=str(tmp_path / "nowhere"))


def test_a_plan_needs_no_data(tmp_path: Path) -> None:
    todo = plan(planned("swad-pacs"), tmp_path)
    assert len(todo.runs) == 4 * 4 * 3
    assert len(todo.trainings) == 2 * 4 * 3  # ERM and SWAD, for each target and seed


# Time


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "measure_pace", lambda *network: (1.0, 3.0))


@pytest.mark.usefixtures("steady")
def test_time_is_counted_image_by_image() -> None:
    pacs, target = dataset_from_card("pacs"), "photo"
    source, tsd = (cell("ablation", row, "PACS") for row in ("source", "+ MSLC"))
    (frozen,) = (run for run in source if (run.target, run.seed) == (target, 0))
    (adapted,) = (run for run in tsd if (run.target, run.seed) == (target, 0))
    assert seconds_of_run(frozen, pacs) == 1670
    assert seconds_of_run(adapted, pacs) == 3 * 1670
    assert seconds_of_run(adapted.model_copy(update={"limit": 100}), pacs) == 300
    searched = adapted.model_copy(update={"select": "source", "hyper": {}})
    held = 0.2 * (9991 - 1670)
    assert seconds_of_run(searched, pacs) == pytest.approx(3 * 1670 + len(search_grid("tsd", {})) * 3 * held)
    t3a = adapted.model_copy(update={"method": "t3a", "select": "source", "hyper": {}})
    assert seconds_of_run(t3a, pacs) == pytest.approx(1670 + held)  # candidates share a pass
    recipe = frozen.recipe(pacs)
    assert recipe is not None
    validations = 1 + (5000 - 100) // 300
    assert seconds_of_training(recipe, pacs) == pytest.approx(3 * 5000 * 32 * 3 + validations * held)
    both = seconds_of_run(frozen, pacs) + seconds_of_training(recipe, pacs)
    assert total_seconds([frozen], [recipe], {"pacs": pacs}) == pytest.approx(both)


def test_sizes_come_from_cards_where_there_are_no_files() -> None:
    assert count_images(dataset_from_card("cifar10-c"), "fog") == 10_000
    assert count_images(dataset_from_card("cifar10-c"), "clean") == 50_000
    assert count_images(dataset_from_card("fundus"), "drishti-gs") == 101
    assert count_images(dataset_from_card("digits"), "type") == 2000


def test_pace_of_a_network_is_measured() -> None:
    forward, both = estimate.measure_pace("digits-net", 32, "cpu")
    assert 0 < forward < both < 1


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.1, "1 seconds"), (100, "100 seconds"), (150, "2 minutes"), (8000, "2 hours"), (9e5, "10 days")],
)
def test_times_as_people_say_them(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words
