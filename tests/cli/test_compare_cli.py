"""The command that compares methods: which images, in which order, with which labels, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner, Result

from trueup.cli import compare
from trueup.cli.app import app
from trueup.cli.compare import open_image_folder, trials_of
from trueup.data.loading import NORMALIZE
from trueup.deploy.estimates import MethodReport, Score
from trueup.testing import convnet
from trueup.views import make_normalization

DIGITS = tuple("0123456789")


def paint(path: Path, value: int) -> None:
    """A picture of one colour, which says what it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((16, 16, 3), value, dtype=np.uint8)).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for label in DIGITS:
        for i in range(4):
            paint(tmp_path / "photos" / label / f"{i}.png", 20 * int(label) + 2 * i)
    return tmp_path / "photos"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `compare_methods` gets: colours in their order, labels, and the rest; it finds nothing."""
    got: dict[str, Any] = {}

    def opened(*_: Any, **__: Any) -> tuple[nn.Module, dict[str, Any]]:
        return convnet(), {"classes": 10, "names": DIGITS, "size": 16, "normalize": "half"}

    def compare_methods(model: nn.Module, methods: Any, batches: Any, **rest: Any) -> list[MethodReport]:
        shown = [(x[:, 0, 0, 0].mul(127.5).add(127.5).round().int().tolist(), y) for x, y in batches()]
        got.update(rest, sizes=[len(x) for x, _ in shown], colours=[c for x, _ in shown for c in x])
        got["labels"] = None if shown[0][1] is None else np.concatenate([y for _, y in shown]).tolist()
        got.setdefault("streams", []).append(got["colours"])
        same = Score.mean(torch.ones(64) * 0.6)
        truth = Score.mean(torch.arange(64) < 32) if got["labels"] else None
        return [MethodReport(n, torch.zeros(64).long(), 1.0, 0.8, 9.0, same, same, None, truth, 1.0) for n in methods]

    monkeypatch.setattr(compare, "open_classifier", opened)
    monkeypatch.setattr(compare, "compare_methods", compare_methods)
    return got


def run(*words: str, **env: str) -> Result:
    return CliRunner().invoke(app, ["compare", *words], env={"COLUMNS": "150", **env})


def test_labels_go_with_their_images_and_folders_are_shuffled(photos: Path, seen: dict[str, Any]) -> None:
    said = run("--data", str(photos), "-b", "16", "-m", "tent")
    assert said.exit_code == 0, said.exception
    assert seen["labels"] == [colour // 20 for colour in seen["colours"]]
    assert seen["colours"] != sorted(seen["colours"])
    assert seen["sizes"] == [16, 16, 8]
    assert seen["pixels"] == make_normalization(*NORMALIZE["half"])
    assert "40 images in random order" in said.output
    assert "10 folders that are the model's classes: labels" in said.output
    before = seen["colours"]
    run("--data", str(photos), "-m", "tent", "-s", "1")
    assert seen["colours"] != before
    assert sorted(seen["colours"]) == sorted(before)


def test_the_order_may_be_said(photos: Path, seen: dict[str, Any], tmp_path: Path) -> None:
    said = run("--data", str(photos), "-m", "tent", "--no-shuffle")
    assert seen["colours"] == sorted(seen["colours"])
    assert "sorted by name" in said.output
    for i in range(20):
        paint(tmp_path / "flat" / f"{i:02}.png", 5 * i)
    said = run("--data", str(tmp_path / "flat"), "-m", "tent", "--limit", "7")
    assert seen["colours"] == [5 * i for i in range(7)]
    assert seen["labels"] is None
    assert "7 images sorted by name" in said.output
    assert "no folders: no labels" in said.output
    run("--data", str(tmp_path / "flat"), "-m", "tent", "--shuffle")
    assert sorted(seen["colours"]) == [5 * i for i in range(20)]
    assert seen["colours"] != sorted(seen["colours"])


def test_some_of_the_classes_are_labels_and_cameras_are_not(photos: Path, tmp_path: Path) -> None:
    for name in ("3.png", "2.png", "1.png", "0.png"):
        (photos / "4" / name).unlink()
    found = open_image_folder(photos, 10, DIGITS)
    assert found.labelled
    assert found.domain.labels.tolist() == [int(name[0]) for name in found.domain.files]
    assert "9 folders that are some of the model's 10 classes: labels" in found.said
    assert not open_image_folder(photos, 10).labelled  # of nine folders nobody knows which is missing
    for k in range(10):
        paint(tmp_path / "cameras" / f"cam{k}" / "0.png", 0)
    cameras = open_image_folder(tmp_path / "cameras", 10, DIGITS)
    assert not cameras.labelled
    assert cameras.nested
    assert "folders are not the model's 10 classes (cam0, cam1, cam2, …): no labels" in cameras.said
    unnamed = open_image_folder(tmp_path / "cameras", 10)
    assert unnamed.labelled
    assert "as many as classes: labels, by their order" in unnamed.said
    paint(tmp_path / "cameras" / "loose.png", 0)
    assert not open_image_folder(tmp_path / "cameras", 10).labelled
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="contains no images"):
        open_image_folder(tmp_path / "empty", 2)


def test_names_with_brackets_are_printed_as_they_are(
    photos: Path, seen: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    said = run("--data", str(photos), "-m", "tsd:params='[bf].*'")
    assert said.exit_code == 0, said.exception
    assert "tsd:params='[bf].*'" in said.output
    assert "take source" in said.output
    half = Score.mean(torch.ones(8) / 2)
    compare.print_report(
        [MethodReport("[bf]", torch.zeros(8), 1.0, 0.8, 9.0, half, None, None, None, 1.0)], {}, broken=0, said="[red]"
    )
    printed = capsys.readouterr().out
    assert "take [bf]" in printed
    assert "[red]" in printed


def test_where_nothing_can_be_told_there_is_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    """One estimate alone is none."""
    half = Score.mean(torch.ones(8) / 2)
    found = [
        MethodReport(name, torch.zeros(8), 1.0, 0.8, 9.0, half, None, half, None, 1.0) for name in ("source", "[bf]")
    ]
    compare.print_report(found, {}, broken=0, said="")
    printed = capsys.readouterr().out
    assert "no advice: keep your model (source)" in printed
    assert "take" not in printed
    compare.print_reports_as_json(found, {}, broken=0, said="")
    told = json.loads(capsys.readouterr().out)
    assert (told["take"], told["certain"]) == (["source"], False)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--device", "nosuch"], "device 'nosuch' cannot be used"),
        (["-m", "tsd:params=[bf].*"], "-m tsd:params=\\[bf\\].*: a value cannot be read"),
        (["-m", "tsd:preset=unsafe"], "no preset is called 'unsafe'. There are: safe"),
        (["-m", "tsd:guard=7"], "guard=7 must be true or false"),
        (["--source", "nosuch"], "nosuch is not a folder"),
    ],
)
def test_what_makes_no_sense_is_refused(photos: Path, seen: dict[str, Any], words: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        raise run("--data", str(photos), *words).exception or AssertionError("it ran")
    assert not seen


def test_no_images_at_all_are_not_a_limit(photos: Path, seen: dict[str, Any]) -> None:
    assert run("--data", str(photos), "--limit", "0").exit_code == 2
    assert not seen


def test_a_normalisation_is_one_that_exists() -> None:
    with pytest.raises(
        ValueError, match="normalize='nonsense' is not known: it must be imagenet or half, or mean and std"
    ):
        compare.open_classifier(None, arch="resnet18", weights="w.pt", classes=10, normalize="nonsense")


def test_the_same_method_with_other_values_is_another() -> None:
    assert list(trials_of(["tent", "tent:lr=0.1"])) == ["source", "tent", "tent:lr=0.1"]


def test_presets_and_guards_are_run() -> None:
    trials = trials_of(["tsd:preset=safe", "tsd:preset=safe,guard=false", "tent:guard=true,lr=0.1", "tent"])
    assert [trial.guard for trial in trials.values()] == [False, True, False, True, False]
    norms = [trial.method.norm for trial in trials.values()]
    assert norms[1:3] == ["robust", "robust"]
    assert norms[4] != "robust"
    assert getattr(trials["tent:guard=true,lr=0.1"].method, "lr", None) == 0.1


def test_source_images_are_shown_clean_and_corrupted(photos: Path, seen: dict[str, Any], tmp_path: Path) -> None:
    for i in range(12):
        paint(tmp_path / "flat" / f"{i:02}.png", 5 * i)
    said = run("--data", str(tmp_path / "flat"), "-m", "tent", "--source", str(photos), "-b", "4")
    assert said.exit_code == 0, said.exception
    target, clean, *corrupted = seen["streams"]
    assert target == [5 * i for i in range(12)]
    assert len(clean) == 12  # no more than there are images to adapt to
    assert {colour // 20 for colour in clean} <= set(range(10))
    assert seen["labels"] is not None
    assert [len(colours) for colours in corrupted] == [12] * 4
    assert [colours == clean for colours in corrupted] == [False, True, False, True]  # one colour cannot be blurred
    assert "calibrated on 64 source images, clean, gaussian_noise-4, defocus_blur-4, fog-4, pixelate-4" in said.output
    assert "estimate %" in said.output
    with pytest.raises(ValueError, match=r"--source .*flat: no folders: no labels; it needs one folder per class"):
        raise run("--data", str(photos), "--source", str(tmp_path / "flat")).exception or AssertionError("it ran")


def test_json_is_all_that_goes_to_the_standard_output(photos: Path, tmp_path: Path, seen: dict[str, Any]) -> None:
    (photos / "0" / "0.png").write_bytes(b"no image")
    said = run("--data", str(photos), "-m", "tent", "-m", "tsd:preset=safe", "--json", "--source", str(photos))
    assert said.exit_code == 0, said.exception
    told = json.loads(said.stdout)
    assert told["unreadable"] == 1
    assert told["images"] == 64
    assert [method["name"] for method in told["methods"]] == ["source", "tent", "tsd:preset=safe"]
    assert list(told["methods"][0]) == [
        "name", "agreement", "entropy", "classes", "confidence", "aetta", "gde", "accuracy", "seconds", "range", "why",
    ]  # fmt: skip
    assert told["methods"][0]["accuracy"] == 0.5
    assert told["methods"][0]["gde"] is None
    assert list(told["scenes"]) == ["clean", "gaussian_noise-4", "defocus_blur-4", "fog-4", "pixelate-4"]
    assert told["take"] == ["source"]
    assert told["certain"] is True
    assert told["reasons"]
    plain = json.loads(run("--data", str(photos), "-m", "tent", "--json").stdout)
    assert plain["scenes"] == {}
    for word in (*told, "aetta"):
        assert word in compare.HELP


def train(*words: str) -> Path:
    told = CliRunner().invoke(
        app, ["train", *words, "-s", "0", "--train", "iterations=3", "--train", "batch=8"], catch_exceptions=False
    )
    assert told.exit_code == 0
    (model,) = Path().rglob("*.safetensors")
    return model


def test_the_command(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", str(train("-t", "type")), "-m", "tent", "-m", "t3a", "-b", "10", "--data"]
    said = run(*words, str(photos))
    assert said.exit_code == 0, said.exception
    for word in ("accuracy %", "guess %", "t3a", "classes: labels", "no advice: keep your model", "Jiang", "--source"):
        assert word in said.output
    told = json.loads(run(*words, str(photos), "-m", "tent:preset=safe", "--json").stdout)
    assert [method["name"] for method in told["methods"]] == ["source", "tent", "t3a", "tent:preset=safe"]
    assert all(0 <= method["gde"] <= 1 for method in told["methods"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0.png").write_bytes(b"no image")
    assert "none of the images can be read" in str(run(*words, str(tmp_path / "broken")).exception)


def test_a_model_that_makes_masks_is_refused(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = train("-d", "fundus-sim", "-t", "handheld")
    refused = run("--model", str(model), "--data", str(photos))
    assert "predicts masks: compare takes a classifier" in str(refused.exception)
