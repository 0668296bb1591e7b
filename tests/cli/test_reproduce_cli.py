"""Every recipe, run small from end to end; plans; lists."""

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from matplotlib.figure import Figure
from test_cli import invoke, trueup

from trueup.bench.reproduce import NETWORKS, get_recipe, recipes
from trueup.core.adapt import adapt
from trueup.source.networks import build_network

# Two steps of training, a validation on few images, and a short stream.
TRAINING = ("iterations=2", "batch=2", "refresh=1", "holdout=0.02")
FAST = [*(word for value in TRAINING for word in ("--train", value)), "--limit", "20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make one folder for all recipes, which share models and runs."""
    return tmp_path_factory.mktemp("paper")


# Networks of timm's with one block left, or another of the family, by the names that recipes use.
TINY = {"resnext26ts": "test_byobnet", "efficientnet_b0": "test_efficientnet"}


@pytest.fixture
def light(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make small networks and draw coarsely, in this process."""
    create, save = timm.create_model, Figure.savefig

    def tiny(name: str, **words: Any) -> Any:
        network = create(TINY.get(name, name), **words)
        if name not in TINY:
            network.blocks = network.blocks[:1]
        return network

    def coarse(figure: Figure, *args: Any, dpi: int, **words: Any) -> None:
        save(figure, *args, dpi=dpi // 4, **words)

    monkeypatch.setattr(timm, "create_model", tiny)
    monkeypatch.setattr(Figure, "savefig", coarse)


@pytest.mark.parametrize("name", sorted(set(NETWORKS.values())))
def test_stand_ins_adapt(name: str) -> None:
    adapter = adapt(build_network(name, 10, size=32), "tsd")
    assert adapter(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert adapter.updates == 1


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("name", list(recipes()))
def test_every_recipe_runs_small(name: str, folder: Path) -> None:
    recipe = get_recipe(name)
    text = invoke("reproduce", name, "--small", "--out", str(folder), *FAST)
    assert recipe.title in " ".join(text.split())
    assert "cells are empty" not in text
    assert "small: on " in text
    for suffix in (".md", ".tex", ".csv"):
        assert (folder / f"{name}-small{suffix}").stat().st_size > 100
    markdown = (folder / f"{name}-small.md").read_text()
    for row, numbers in recipe.numbers["mean"].items():
        line = next((line for line in markdown.splitlines() if line.startswith(f"| {row} ")), None)
        if line is None:
            assert name.startswith("statistics")  # its rows are two of each
            continue
        printed = [float(number) for number in re.findall(r"(?<![\d.+-])\d+(?:\.\d+)?(?![\d.])", line)]
        assert set(numbers.values()) <= set(printed)  # the paper's numbers are those of its table
    for figure in recipe.figures:
        assert list((folder / "figures" / f"{name}-small").glob(f"{figure}*.pdf")), figure
        assert list((folder / "figures" / f"{name}-small").glob(f"{figure}*.svg")), figure


def test_all_are_listed() -> None:
    text = invoke("reproduce")
    assert all(name in text for name in recipes())


def test_a_plan_says_what_and_how_long_and_needs_no_data(tmp_path: Path) -> None:
    text = invoke("reproduce", "updated-parameters", "--dry-run", "--train", "size=32", "--out", str(tmp_path / "out"))
    assert "not found, taken from dataset cards: pacs" in text
    assert re.search(r"12 source models to train, 24 of 24 runs to do: about \d+ \w+", " ".join(text.split()))
    assert not (tmp_path / "out").exists()
    assert "this recipe counts images" in invoke("reproduce", "vlcs-labels", "--dry-run")


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = trueup("reproduce", "ablation", "--data", ".", cwd=tmp_path, status=2).stderr
    assert "needs pacs" in said
    assert "--small" in said
