"""`trueup stress` as its users type it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_cli import invoke, trueup
from typer.testing import CliRunner

from trueup.bench.records import read_records
from trueup.bench.stress import SCENARIOS
from trueup.cli.app import app
from trueup.source.networks import build_network

FAST = ["--quick", "--limit", "64", "--train", "iterations=6", "--train", "batch=8"]


def test_help_names_every_scenario() -> None:
    result = CliRunner().invoke(app, ["stress", "--help"], env={"COLUMNS": "200"})
    text = " ".join(result.output.replace("│", " ").split())
    for name in SCENARIOS:
        assert name in text
    assert "--quick" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--scenario", "nann"], "Did you mean 'nan'?"),
        (["-m", "tsd:preset=save"], "no preset is called 'save'"),
        (["-m", "tsd:guard=often"], "guard='often' must be true or false"),
        (["-t", "hamd"], "Did you mean 'hand'?"),
        (["-d", "fundus-sim", "--scenario", "replay-10"], "no scenario is left"),
    ],
)
def test_errors_are_one_sentence(words: list[str], says: str, tmp_path: Path) -> None:
    done = trueup("stress", *words, "--dry-run", cwd=tmp_path, status=2)
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_dry_run_says_what_each_scenario_does(tmp_path: Path) -> None:
    text = trueup("stress", "--dry-run", cwd=tmp_path).stdout
    for name in SCENARIOS:
        assert any(line.startswith(f"{name} ") and line.split()[-2:] == ["120", "0"] for line in text.splitlines())
    assert "one image has a NaN pixel" in text
    assert "tsd, safe" in text
    assert "1920 runs: 0 done, 1920 to run; 24 source models to train" in text
    text = trueup("stress", "--quick", "-m", "bn", "-d", "fundus-sim", "--dry-run", cwd=tmp_path).stdout
    assert "class-sorted is left out on fundus-sim: it needs classes, and this dataset has masks" in text
    assert "22 runs: 0 done" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_a_stress_test_from_nothing_to_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["stress", "-m", "tent", "-m", "tsd:preset=safe", *FAST]
    words += [word for name in ("iid", "long", "nan", "crafted-10") for word in ("--scenario", name)]
    text = invoke(*words)
    assert "12 records in stress/records.jsonl" in text
    assert "picture in stress/stress.png and stress/stress.svg" in text
    assert "tsd, safe" in text
    assert "difference from source in points" in text
    with Image.open(tmp_path / "stress" / "stress.png") as picture:
        assert min(picture.size) > 300
    for suffix, sign in ((".md", "| method"), (".tex", r"\toprule"), (".csv", "label,method")):
        assert (tmp_path / "stress" / f"stress{suffix}").read_text().count(sign) == 3
    before = (tmp_path / "stress" / "records.jsonl").read_bytes()
    assert "12 records" in invoke(*words)
    assert (tmp_path / "stress" / "records.jsonl").read_bytes() == before, "what is recorded is not run again"
    assert "accuracy in %" in invoke("report", "stress")
    records = read_records(tmp_path / "stress")
    assert {r["results"]["images"] for r in records} == {64, 4 * 64}
    disturbed = [r for r in records if r["settings"].get("disturb") == "nan"]
    refused = {(r["settings"]["method"], r["results"]["refused"]) for r in disturbed}
    assert refused == {
        ("source", 0),
        ("tent", 1),
        ("tsd", 0),
    }  # a frozen network need not refuse the others of the batch


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_a_model_and_images_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for label in ("cat", "dog"):
        (tmp_path / "photos" / "street" / label).mkdir(parents=True)
        for i in range(12):
            light = np.full((16, 16, 3), 120 * (label == "cat") + 3 * i, dtype=np.uint8)
            Image.fromarray(light).save(tmp_path / "photos" / "street" / label / f"{i}.png")
    torch.save(build_network("digits-net", 2, size=16).state_dict(), tmp_path / "model.pt")
    words = ["stress", "-d", "folder", "-r", "photos", "--checkpoint", "model.pt", "-n", "digits-net", "-m", "bn"]
    flags = ["--train", "size=16", "--scenario", "nan", "--scenario", "mixed", "--scenario", "batch-4"]
    text = invoke(*words, *flags, "-s", "0", "-o", "mine")
    assert "mixed is left out on folder: there is no other domain to mix a target with" in text
    assert "4 records in mine/records.jsonl" in text


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_a_failure_makes_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["stress", "-m", "tent:params=nothing_like_it", "--scenario", "iid", *FAST]
    text = invoke(*words, status=1)
    assert "failed: tent in iid on digits/hand, seed 0" in text
    assert "1 records in" in text
