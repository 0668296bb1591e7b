"""`--mean`, `--std` and `--grey` in every verb that takes a model."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from trueup.bench.settings import make_sweep
from trueup.cli import options
from trueup.cli.app import app
from trueup.source.checkpoints import Store
from trueup.source.networks import build_network
from trueup.source.recipe import Recipe, Training

NET = """
import torch
SEEN = []
class Net(torch.nn.Module):
    def __init__(self, classes, pixels):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        self.head = torch.nn.Conv2d(4, classes, 1) if pixels else torch.nn.Linear(4, classes)
        self.pixels = pixels
    def forward(self, x):
        SEEN.append(x.clone())
        z = self.body(x)
        return self.head(z if self.pixels else z.mean(dim=(2, 3)))
def classifier(classes):
    return Net(classes, False)
def segmenter(classes):
    return Net(classes, True)
"""
RNG = np.random.default_rng(0)


def invoke(*words: str, status: int = 0) -> Result:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Colourful images in a folder, and networks of one channel beside it."""
    (tmp_path / "grey_nets.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "grey_nets", raising=False)
    for domain in ("day", "night"):
        for label in ("cat", "dog"):
            folder = tmp_path / "photos" / domain / label
            folder.mkdir(parents=True)
            for i in range(4):
                Image.fromarray(RNG.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "photos"


def seen() -> "list[torch.Tensor]":
    nets = importlib.import_module("grey_nets")
    found = list(nets.SEEN)
    nets.SEEN.clear()
    return found


def luminance(folder: Path) -> "set[bytes]":
    """Grey images with mean 0.25 and std 0.5, worked out with Pillow."""
    files = folder.rglob("*.png")
    grey = [np.asarray(Image.open(f).convert("L"), dtype=np.float64) for f in files]
    return {np.round((g / 255 - 0.25) / 0.5, 4).astype(np.float32).tobytes() for g in grey}


def as_bytes(batches: "list[torch.Tensor]") -> "set[bytes]":
    return {np.round(row[0].double().numpy(), 4).astype(np.float32).tobytes() for x in batches for row in x}


@pytest.mark.parametrize("verb", ["bench", "run", "train", "stress", "compare", "segment"])
def test_every_command_that_takes_a_model_has_the_flags(verb: str) -> None:
    said = invoke(verb, "--help").output
    assert all(flag in said for flag in ("--mean", "--std", "--grey"))


def test_flags_are_settings_of_what_networks_see() -> None:
    sweep = make_sweep(options.settings_of({"training": ["size=8"], "mean": "0.1,0.2,0.3", "std": "0.25"}))
    assert sweep.training == {"size": 8, "normalize": [[0.1, 0.2, 0.3], [0.25, 0.25, 0.25]]}
    assert options.settings_of({"training": None, "grey": True}) == {"training": {"grey": True}}
    assert options.settings_of({"mean": "0.5", "std": "0.5"}) == {"training": {"normalize": "half"}}


@pytest.mark.parametrize(
    ("mean", "std", "training", "says"),
    [
        ("0.5", None, [], "--mean is given alone"),
        (None, "0.5", [], "--std is given alone"),
        ("0.5", "half", [], "--std 'half' must be one number, or three"),
        ("0.5", "0.5", ["normalize=half"], "contradict the normalisation 'half'"),
    ],
)
def test_flags_that_mean_nothing_are_refused(mean: str | None, std: str | None, training: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        options.settings_of({"training": training, "mean": mean, "std": std})


FLAGS = ("--grey", "--mean", "0.25", "--std", "0.5")


def test_a_network_of_one_channel_is_trained_and_run_on_grey_images(photos: Path) -> None:
    words = ("-d", "folder", "-r", str(photos), "-n", "grey_nets:classifier", "-w", "none")
    values = ("augment=none", "size=8", "iterations=2", "batch=2", "holdout=0.5")
    small = [word for value in values for word in ("--train", value)]
    record = json.loads(invoke("run", "source", "-t", "night", *words, *small, *FLAGS).stdout)
    assert record["settings"]["source"]["normalize"] == [[0.25], [0.5]]
    assert record["settings"]["source"]["grey"] is True
    shown = as_bytes(seen())
    assert luminance(photos / "night") <= shown <= luminance(photos)
    colourful = ("run", "source", "-t", "night", *words, *small, "--train", "lr=1e-5")
    with pytest.raises(ValueError, match="to have 1 channels, but got 3 channels"):
        invoke(*colourful)


def test_a_file_of_weights_is_asked_about_grey_images(photos: Path) -> None:
    nets = importlib.import_module("grey_nets")
    torch.save(nets.classifier(2).state_dict(), photos.parent / "net.pt")
    words = ("-d", "folder", "-r", str(photos), "-n", "grey_nets:classifier", "--train", "size=8")
    seen()
    record = json.loads(invoke("run", "tent", "-t", "night", "--checkpoint", "net.pt", *words, *FLAGS).stdout)
    assert record["settings"]["source"]["grey"] is True
    assert as_bytes(seen()) >= luminance(photos / "night")
    arch = ("--arch", "grey_nets:classifier", "--weights", "net.pt", "--classes", "2", "--size", "8")
    invoke("compare", "--data", str(photos / "night"), *arch, *FLAGS, "-m", "tent")
    assert as_bytes([x for x in seen() if x.shape[0] == 8]) >= luminance(photos / "night")


def test_segment_shows_grey_images(photos: Path, tmp_path: Path) -> None:
    nets = importlib.import_module("grey_nets")
    torch.save(nets.segmenter(2).state_dict(), photos.parent / "net.pt")
    seen()
    folder = photos / "day" / "cat"
    arch = ("--arch", "grey_nets:segmenter", "--weights", "net.pt", "--classes", "2", "--size", "8")
    invoke("segment", "-i", str(folder), "-o", "masks", *arch, *FLAGS, "-m", "source")
    assert as_bytes([x for x in seen() if x.shape[0] == 4]) == luminance(folder)
    with pytest.raises(ValueError, match="grey was True and is None"):
        invoke("segment", "-i", str(folder), "-o", "masks", "--arch", "small-unet", "--weights", colour(tmp_path),
               "--classes", "2", "--size", "8", *FLAGS[1:], "-m", "source")  # fmt: skip
    with pytest.raises(ValueError, match="--grey if it takes one channel"):
        invoke("segment", "-i", str(folder), "-o", "other", *arch)


def colour(folder: Path) -> str:
    torch.save(build_network("small-unet", 2).state_dict(), folder / "colour.pt")
    return str(folder / "colour.pt")


def ours(folder: Path, **training: Any) -> str:
    made = Recipe(
        dataset="folder", sources=("noon",), classes=2, network="digits-net",
        training=Training(size=8, **training),
    )  # fmt: skip
    Store(folder).save(made, build_network("digits-net", 2, channels=made.training.channels.count), {"kept": {}})
    return str(Store(folder).path(made))


def test_a_checkpoint_knows_what_it_sees_and_conflicts_are_refused(photos: Path, tmp_path: Path) -> None:
    file = ours(tmp_path, grey=True, normalize=[0.25, 0.5])
    words = ("run", "source", "-t", "night", "-d", "folder", "-r", str(photos), "-n", "digits-net")
    words += ("--checkpoint", file)
    record = json.loads(invoke(*words).stdout)
    assert (record["settings"]["source"]["normalize"], record["settings"]["source"]["grey"]) == ([[0.25], [0.5]], True)
    assert json.loads(invoke(*words, *FLAGS).stdout)["id"] == record["id"]
    with pytest.raises(ValueError, match=r"was trained with normalize=.*, not half: leave it out"):
        invoke(*words, "--mean", "0.5", "--std", "0.5")
    plain = ours(tmp_path)
    with pytest.raises(ValueError, match="was trained with grey=False, not True"):
        invoke(*words[:-1], plain, "--grey")
    for verb in ("compare", "segment"):
        place = ("--data", str(photos)) if verb == "compare" else ("-i", str(photos), "-o", "masks")
        with pytest.raises(ValueError, match="--mean cannot be given with --model: the checkpoint sets it"):
            invoke(verb, "--model", file, *place, "--mean", "0.5", "--std", "0.5")
