"""`trueup segment` as it is typed: checkpoints of ours and of others, and what is said in the end."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from trueup.cli import main
from trueup.cli.app import app
from trueup.cli.segment import open_segmenter, parse_method
from trueup.source.checkpoints import Store
from trueup.source.networks import build_network
from trueup.source.recipe import Recipe, Training

QUICK = ["--method", "tsd:lr=1e-3,queries=16,neighbors=4"]


def checkpoint(folder: Path, dataset: str = "cardiac", classes: int = 4, **training: Any) -> str:
    """A model of ours that has learnt nothing."""
    torch.manual_seed(0)
    recipe = Recipe(
        dataset=dataset,
        sources=("a",),
        classes=classes,
        network="small-unet",
        training=Training(**{"size": 32, "normalize": "half", "augment": "none", **training}),
    )
    Store(folder).save(recipe, build_network("small-unet", classes), {"kept": {}})
    return str(Store(folder).path(recipe))


def invoke(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["segment", *words], catch_exceptions=False, env={"COLUMNS": "120"})
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """A volume and two pictures."""
    rng, folder = np.random.default_rng(0), tmp_path / "scans"
    (folder / "eyes").mkdir(parents=True)
    values = rng.integers(0, 900, (40, 36, 3)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([12.5, 12.5, 50.0, 1.0])), folder / "heart.nii.gz")
    for n in range(2):
        Image.fromarray(rng.integers(0, 255, (40, 32, 3)).astype(np.uint8)).save(folder / "eyes" / f"{n}.png")
    return folder


def masks(out: Path) -> list[str]:
    return sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file() and p.parent.name != ".trueup")


def test_help_shows_how(tmp_path: Path) -> None:
    text = invoke("--help")
    assert "trueup segment --model heart.safetensors --images scans --out masks" in text
    for flag in ("--arch", "--weights", "--classes", "--field", "--label", "--fresh"):
        assert flag in text


def test_a_checkpoint_of_ours_knows_what_it_needs(scans: Path, tmp_path: Path) -> None:
    model, out = checkpoint(tmp_path), tmp_path / "out"
    words = ["--model", model, "--images", str(scans), "--out", str(out), *QUICK]
    assert f"3 masks in {out}; tsd, 2 updates so far" in invoke(*words)
    assert masks(out) == ["eyes/0.png", "eyes/1.png", "heart.nii.gz"]
    mask = np.asarray(nibabel.load(out / "heart.nii.gz").dataobj)
    seen = slice(6, 34), slice(4, 32)  # 350 mm are 28 pixels of 12.5 mm
    assert mask[seen].any()
    assert mask.sum() == mask[seen].sum(), "the network saw more than 350 mm"
    again = invoke(*words)
    assert "3 images were already done" in again
    assert f"0 masks in {out}" in again
    with pytest.raises(ValueError, match="seed was 0 and is 1"):
        invoke(*words, "--seed", "1")
    assert "3 masks" in invoke(*words, "--seed", "1", "--fresh")


@pytest.mark.parametrize(
    ("dataset", "classes", "multilabel", "field", "labels"),
    [
        ("cardiac", 4, False, 350.0, None),
        ("prostate", 2, False, 160.0, None),
        ("prostate-sim", 2, False, None, None),
        ("fundus", 2, True, None, ("disc", "cup")),
        ("fundus-sim", 2, True, None, ("disc", "cup")),
        ("masks", 3, True, None, None),
    ],
)
def test_recipes_say_how_to_look(
    dataset: str, classes: int, multilabel: bool, field: float | None, labels: tuple[str, ...] | None, tmp_path: Path
) -> None:
    _, settings = open_segmenter(checkpoint(tmp_path, dataset, classes, multilabel=multilabel))
    assert settings.get("field") == field
    assert settings.get("labels") == labels
    assert settings.get("multilabel", False) == multilabel
    assert (settings["size"], settings["normalize"]) == (32, "half")


def test_labels_give_files_their_names(scans: Path, tmp_path: Path) -> None:
    words = ["--images", str(scans / "eyes"), "--method", "bn"]
    model = checkpoint(tmp_path, "fundus", 2, multilabel=True)
    invoke("--model", model, *words, "--out", str(tmp_path / "known"))
    assert masks(tmp_path / "known") == ["0-cup.png", "0-disc.png", "1-cup.png", "1-disc.png"]
    invoke("--model", model, *words, "--out", str(tmp_path / "told"), "--label", "a", "--label", "b")
    assert masks(tmp_path / "told") == ["0-a.png", "0-b.png", "1-a.png", "1-b.png"]
    with pytest.raises(ValueError, match="2 labels, not 1: a"):
        invoke("--model", model, *words, "--out", str(tmp_path / "few"), "--label", "a")


@pytest.mark.parametrize("method", ["source", "tsd:lr=1e-3,queries=16,neighbors=4"])
def test_a_network_of_others(method: str, scans: Path, tmp_path: Path) -> None:
    arch = "smp:deeplabv3plus/mobilenet_v2"
    torch.manual_seed(0)
    save_file(build_network(arch, 3).state_dict(), tmp_path / "deeplab.safetensors")
    (scans / "eyes" / "1.png").unlink()  # a lone picture: nothing to take the variance of, after global pooling
    words = ["--arch", arch, "--weights", str(tmp_path / "deeplab.safetensors"), "--classes", "3", "--size", "64"]
    out = tmp_path / "out"
    text = invoke(*words, "--images", str(scans / "eyes"), "--out", str(out), "--method", method, "--normalize", "half")
    assert f"1 masks in {out}" in text
    mask = np.asarray(Image.open(out / "0.png"))
    assert mask.shape == (40, 32)
    assert mask.max() < 3


def test_methods_are_read_as_everywhere() -> None:
    name, hyper = parse_method("tsd:lr=1e-5,per_class=none")
    assert name == "tsd"
    assert (hyper["lr"], hyper["per_class"], hyper["samples"]) == (1e-5, None, 32)
    for text, says in (("tds", "Did you mean 'tsd'?"), ("tsd:lrr=1", "did you mean 'lr'?"), ("t3a", "not for segm")):
        with pytest.raises(ValueError, match=says.replace("?", r"\?")):
            parse_method(text)


def test_what_does_not_go_together_is_refused(scans: Path, tmp_path: Path) -> None:
    ours, classifier = checkpoint(tmp_path), checkpoint(tmp_path, "digits", 10, size=16)
    theirs = str(tmp_path / "theirs.safetensors")
    save_file(build_network("small-unet", 2).state_dict(), theirs)
    folders = ["--images", str(scans), "--out", str(tmp_path / "out")]
    for words, says in (
        ([], "--arch is missing: give --model"),
        (["--arch", "small-unet"], "--weights is missing"),
        (["--arch", "small-unet", "--weights", theirs], "--classes is missing"),
        (["--model", ours, "--size", "64"], "--size cannot be given with --model"),
        (["--model", ours, "--multilabel"], "--multilabel cannot be given with --model"),
        (["--model", theirs], "has no trueup recipe: give --arch"),
        (["--model", classifier], "trained on digits and is a classifier"),
        (["--model", str(tmp_path / "nothing")], "nothing is not a file"),
        (["--arch", "small-unet", "--weights", ours, "--classes", "4"], "has a recipe: give it as --model"),
        (["--arch", "small-unet", "--weights", theirs, "--classes", "3"], "does not fit the model"),
        (["--arch", "small-unett", "--weights", theirs, "--classes", "2"], "did you mean 'small-unet'"),
        (["--arch", "smp:unett", "--weights", theirs, "--classes", "2"], "did you mean 'unet'"),
        (["--model", ours, "--label", "a"], "for multilabel"),
        (["--model", ours, "--field", "0"], "field=0.0"),
        (["--model", ours, "--device", "nowhere"], "device 'nowhere'"),
    ):
        with pytest.raises(ValueError, match=says):
            invoke(*words, *folders)
    assert not (tmp_path / "out").exists()


def test_a_network_of_ones_own_runs_if_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_segmenter.py").write_text("from trueup.source.architectures import SmallUNet as net\n")
    training = Training(size=32, normalize="half", augment="none")
    recipe = Recipe(dataset="cardiac", sources=("a",), classes=4, network="my_segmenter:net", training=training)
    theirs = build_network("small-unet", 4)
    Store(tmp_path).save(recipe, theirs, {"kept": {}})
    model = str(Store(tmp_path).path(recipe))
    with pytest.raises(ValueError, match="--arch my_segmenter:net"):
        open_segmenter(model)
    with pytest.raises(ValueError, match="not a small-unet"):
        open_segmenter(model, arch="small-unet")
    assert "my_segmenter" not in sys.modules
    network, settings = open_segmenter(model, arch="my_segmenter:net")
    assert all(torch.equal(theirs.state_dict()[name], tensor) for name, tensor in network.state_dict().items())
    assert settings["size"] == 32


def test_broken_images_are_named_and_make_the_exit_status(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = checkpoint(tmp_path)
    (scans / "eyes" / "0.png").write_bytes(b"[red]broken")
    (scans / "notes.txt").write_text("no image")
    words = ["--model", model, "--images", "scans", "--out", "masks", "--method", "bn"]
    text = invoke(*words, status=1)
    assert "left out, cannot be read: eyes/0.png (0.png: cannot identify image file" in text
    assert "not images: notes.txt" in text
    assert "2 masks in masks; bn, 0 updates so far" in text
    assert masks(tmp_path / "masks") == ["eyes/1.png", "heart.nii.gz"]
    monkeypatch.setattr(sys, "argv", ["trueup", "segment", *words, "--batch", "3"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "batch was 8 and is 3" in line


NET_3D = """
import torch
def make(classes):
    torch.manual_seed(0)
    body = torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.BatchNorm3d(4), torch.nn.ReLU()
    return torch.nn.Sequential(*body, torch.nn.Conv3d(4, classes, 1))
"""


def test_a_network_in_3d_sees_windows_of_volumes(scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "solid_net.py").write_text(NET_3D)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.save(importlib.import_module("solid_net").make(3).state_dict(), "net.pt")
    words = ["--arch", "solid_net:make", "--weights", "net.pt", "--classes", "3", "-i", str(scans), "-o", "out"]
    text = invoke(
        *words, "--volumes", "--window", "16", "16", "3", "--overlap", "0", "-m", "tent", "--range", "0", "900"
    )
    assert "not volumes: eyes/0.png, eyes/1.png" in text
    assert "1 masks in out; tent, 9 updates so far" in text  # 3 × 3 × 1 windows, one at a time
    assert nibabel.load("out/heart.nii.gz").shape == (40, 36, 3)
    settings = json.loads(Path("out/.trueup/journal.json").read_text())["settings"]
    assert (settings["window"], settings["overlap"], settings["batch"]) == ([16, 16, 3], 0, 1)
    for flags, says in {
        ("--size", "32", "--volumes"): "--size is not used with --volumes",
        ("--grey", "--volumes"): "--grey is not used with --volumes",
        ("--window", "8", "8", "8"): "--window needs --volumes",
        ("--overlap", "0.5"): "--overlap needs --volumes",
        (): "solid_net:make is a 3-D network: give --volumes",
    }.items():
        with pytest.raises(ValueError, match=says):
            invoke(*words, *flags)
    with pytest.raises(ValueError, match="--model is from `trueup train`, whose networks are 2-D"):
        invoke("--model", "net.pt", "--volumes", "-i", str(scans), "-o", "out")
