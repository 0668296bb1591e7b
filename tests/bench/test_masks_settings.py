"""Settings of runs with masks: what a few lines mean, what is refused, and that methods are those for pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trueup.core.registry as registry
from trueup.bench.hparam_search import search_grid
from trueup.bench.settings import MASK_METHODS, PAPER_METHODS, Run, make_sweep, resolve_hyper
from trueup.core.registry import get_method, make_method
from trueup.data.datasets import open_dataset
from trueup.source.recipe import training_for

# What is refused


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"dataset": "fundus-sim", "stream": "class-sorted"},
            "'class-sorted' does not fit fundus-sim, which has masks",
        ),
        ({"dataset": "fundus-sim", "stream": "dirichlet"}, "'dirichlet' does not fit fundus-sim, which has masks"),
        ({"dataset": "fundus-sim", "stream": "label-shift"}, "'label-shift' does not fit fundus-sim, which has masks"),
        ({"dataset": "digits", "stream": "cases"}, "'cases' does not fit digits, which has images, not cases"),
        ({"dataset": "fundus-sim", "target": "handheld+screening"}, "iid takes one domain"),
        ({"dataset": "cardiac-sim", "target": "cine+lge", "stream": "mixed"}, "all domains of cardiac-sim are targets"),
        ({"dataset": "fundus-sim", "target": "hendheld"}, "'hendheld'.* Did you mean 'handheld'"),
        ({"dataset": "fundus-sim", "target": "handheld:all"}, "no domain 'handheld:all'; there are: clinic, screening"),
        ({"dataset": "fundus-sim", "method": "t3a"}, "t3a is not for segmentation: the entropy of pixels"),
        ({"dataset": "fundus-sim", "method": "lame"}, "lame is not for segmentation: it compares all pairs"),
        ({"dataset": "fundus-sim", "method": {"tsd": {"variant": "released"}}}, "no hyper-parameter 'variant'"),
        ({"dataset": "fundus-sim", "network": "smp:unett"}, "no architecture 'unett'; did you mean 'unet'"),
        ({"dataset": "fundus-sim", "training": {"augment": "shift"}}, "augment='shift' does not transform masks"),
        ({"dataset": "digits", "training": {"augment": "affine"}}, "augment='affine' is for masks"),
        ({"dataset": "digits", "training": {"multilabel": True}}, "multilabel is for masks"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_sweep(values).runs()


# Settings


def one(**values: Any) -> Run:
    (run,) = make_sweep({"dataset": "fundus-sim", "target": "handheld", "seed": 0, "method": "tsd"} | values).runs()
    return run


def test_default_sweep_is_the_papers_methods_that_make_masks() -> None:
    found = make_sweep({"dataset": "fundus-sim"}).runs()
    assert (
        [run.method for run in found[:7]]
        == list(MASK_METHODS)
        == [m for m in PAPER_METHODS if m not in ("t3a", "lame")]
    )
    assert {run.target for run in found} == {"screening", "handheld"}
    assert len(found) == 7 * 2 * 3
    assert {(run.network, run.weights, run.batch) for run in found} == {("small-unet", "none", 8)}


def test_hyper_parameters_are_those_for_pixels() -> None:
    """K = 64 of the pixels, not 3 of the images."""
    hyper = one().hyper
    assert hyper == get_method("tsd", "segmentation")().hyperparameters()
    assert (hyper["neighbors"], hyper["capacity"], hyper["per_class"]) == (64, 1024, "half")
    assert "variant" not in hyper
    assert resolve_hyper("tsd", {}, "default")["neighbors"] == 3
    assert resolve_hyper("tsd", {"alignment": 1, "per_class": "none"}, "default", "segmentation") == (
        make_method("tsd", {"alignment": 1.0, "per_class": None}, "segmentation").hyperparameters()
    )


def test_a_search_on_masks_tries_learning_rates_and_the_weight_of_neighbours() -> None:
    found = search_grid("tsd", {}, "segmentation")
    assert {(c["lr"], c["alignment"]) for c in found} == {
        (lr, a) for lr in (1e-3, 1e-4, 1e-5, 1e-6) for a in (0.1, 1.0)
    }
    assert [c["lr"] for c in found] == sorted(c["lr"] for c in found)
    for candidate in found:
        make_method("tsd", candidate, "segmentation")
    assert set(one().hyper) - set(one(select="source").hyper) == {"lr", "alignment"}
    assert search_grid("t3a", {}, "segmentation") == []


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("fundus-sim", {"augment": "none", "normalize": "half", "batch": 8, "optimizer": "adam"}),
        ("cardiac-sim", {"augment": "none", "normalize": "half", "batch": 8, "optimizer": "adam"}),
        ("prostate", {"size": 256, "augment": "affine", "normalize": "imagenet", "lr": 1e-4, "optimizer": "adam"}),
        ("masks", {"size": 256, "augment": "affine", "iterations": 5000, "batch": 8}),
    ],
)
def test_trainings_of_masks(dataset: str, expected: dict[str, Any]) -> None:
    training = training_for(dataset).model_dump()
    assert {key: training[key] for key in expected} == expected


def test_recipe_trains_on_the_usual_source_and_has_an_output_for_each_class_or_label() -> None:
    dataset = open_dataset("fundus-sim")
    classes, labels = (one(training={"multilabel": m}).recipe(dataset) for m in (False, True))
    assert classes is not None
    assert labels is not None
    assert (classes.sources, classes.classes, labels.classes) == (("clinic",), 3, 2)
    assert classes.digest() != labels.digest()
    assert "multilabel" not in one().model_dump(mode="json")["source"]
    other = one(target="clinic").recipe(dataset)  # no usual source of its own: all others
    assert other is not None
    assert other.sources == ("screening", "handheld")


def folder(root: Path) -> Path:
    """A folder of one's own with two domains."""
    (root / "classes.txt").write_text("nothing\nblob\n")
    for domain in ("a", "b"):
        for kind in ("images", "masks"):
            (root / domain / kind).mkdir(parents=True)
        for n in range(3):
            Image.fromarray(np.full((16, 16), 90 * n, np.uint8)).save(root / domain / "images" / f"{n}.png")
            Image.fromarray(np.eye(16, dtype=np.uint8)).save(root / domain / "masks" / f"{n}.png")
    return root


def test_targets_may_be_parts(tmp_path: Path) -> None:
    values = {"dataset": "masks", "root": str(folder(tmp_path)), "seed": 0, "method": "bn"}
    plain, everything = make_sweep(values | {"target": ["a", "a:all"]}).runs()
    assert (plain.targets, everything.targets) == (("a",), ("a:all",))
    assert plain.digest() != everything.digest()
    dataset = open_dataset("masks", tmp_path)
    for run in (plain, everything):
        recipe = run.recipe(dataset)
        assert recipe is not None
        assert (recipe.sources, recipe.classes) == (("b:all",), 2)
    assert (plain.network, plain.batch) == ("smp:deeplabv3plus/mobilenet_v2", 8)
    for target, said in (("a:al", "no part 'al'; there is: train, all"), ("c:all", "'c'")):
        with pytest.raises(ValueError, match=said):
            make_sweep(values | {"target": target}).runs()


def test_own_method_for_pixels_under_a_known_name_counts_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_METHODS", {name: list(family) for name, family in registry._METHODS.items()})
    Path("pixel_lame.py").write_text(
        "from dataclasses import dataclass\nfrom trueup import Info, Method, register\n@register\n"
        "@dataclass(frozen=True, kw_only=True)\nclass PixelLame(Method):\n"
        '    info = Info(name="lame", title="Lame", paper="none", tasks=("segmentation",))\n'
    )
    assert one(method="lame", plugin="pixel_lame").code["method"].startswith("sha256:")
    (images,) = make_sweep({"target": "hand", "seed": 0, "method": "lame", "plugin": "pixel_lame"}).runs()
    assert images.code == {}
