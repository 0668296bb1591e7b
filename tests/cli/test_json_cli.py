"""`--json`: the standard output is one JSON value, whatever happens beside it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from PIL import Image
from typer.testing import CliRunner

from trueup.bench.records import FILE, read_records
from trueup.bench.stress import Stress
from trueup.bench.sweep import SweepSummary
from trueup.cli import options, stress
from trueup.cli.app import app


def parsed(*words: str, status: int = 0) -> Any:
    """The standard output of a command in this process."""
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False, env={"COLUMNS": "80"})
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def trueup(*words: str, cwd: Path, status: int = 0) -> Any:
    """That of a command in a process of its own; a flood of logs goes to the other output."""
    done = warm.call("-m", "trueup", "--verbose", *words, "--json", cwd=cwd, environment={"COLUMNS": "80"})
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for domain in ("day", "night"):
        for label in ("cat", "dog"):
            (tmp_path / "photos" / domain / label).mkdir(parents=True)
            for i in range(3):
                pixels = np.full((8, 8, 3), 80 * i, dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / domain / label / f"{i}.png")
    return tmp_path / "photos"


def test_a_check_of_images(photos: Path) -> None:
    found = parsed("data", "check", "folder", "--root", str(photos))
    each = {"cat": 3, "dog": 3}
    assert found == {
        "dataset": "folder", "ok": True, "opened": True, "problems": [], "notes": [], "broken": [], "others": [],
        "images": 12, "classes": ["cat", "dog"], "domains": {"day": each, "night": each},
    }  # fmt: skip
    (photos / "day" / "cat" / "0.png").write_bytes(b"no picture")
    (photos / "day" / "dog" / "notes [x].txt").write_text("no picture")
    found = parsed("data", "check", "folder", "--root", str(photos), status=1)
    assert found["ok"] is False
    assert found["broken"] == ["day/cat/0.png"]
    assert found["problems"] == ["1 images cannot be read: day/cat/0.png"]
    assert found["others"] == ["day/dog/notes [x].txt"]


def test_a_check_of_masks(tmp_path: Path) -> None:
    for kind in ("images", "masks"):
        (tmp_path / "own" / "a" / kind).mkdir(parents=True)
    mask = np.zeros((6, 8), dtype=np.uint8)
    mask[2:4, 2:5] = 1
    Image.fromarray(mask * 100).save(tmp_path / "own" / "a" / "images" / "0.png")
    Image.fromarray(mask).save(tmp_path / "own" / "a" / "masks" / "0.png")
    words = ("data", "check", "masks", "--root", str(tmp_path / "own"), "--pictures", str(tmp_path / "drawn"))
    found = parsed(*words)
    assert (found["ok"], found["cases"], found["slices"], found["structures"]) == (True, 1, 1, ["class 1"])
    (part,) = found["domains"].values()
    assert part == {
        "cases": 1, "slices": 1, "read": 1, "structures": {"class 1": {"cases": 1, "share": 6 / 48}},
        "sizes": [[6, 8]], "spacings": [],
    }  # fmt: skip
    assert found["drawn"]
    assert all(Path(file).is_file() for file in found["drawn"])


WORDS = ("stress", "--quick", "--limit", "64", "--train", "iterations=3", "-m", "tent", "--scenario", "iid")
WORDS += ("--scenario", "nan")


def test_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    planned = parsed(*WORDS, "--dry-run")
    assert [(s["name"], s["runs"], s["done"]) for s in planned["scenarios"]] == [("iid", 2, 0), ("nan", 2, 0)]
    assert planned["methods"] == ["source", "tent"]
    assert (planned["runs"], planned["waiting"], planned["trainings"], planned["left_out"]) == (4, 4, 1, [])
    monkeypatch.setattr(Stress, "left_out", lambda *_: ["nan is left out"])
    assert parsed(*WORDS, "--dry-run")["left_out"] == ["nan is left out"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_stress_test(tmp_path: Path) -> None:
    found = trueup(*WORDS, cwd=tmp_path)
    assert (found["ok"], found["records"], found["failures"], found["left_out"]) == (True, 4, [], [])
    assert all((tmp_path / file).is_file() for file in found["files"])
    (test,) = found["tests"]
    assert test["metric"] == "accuracy"
    accuracy = {
        (r["settings"]["method"], "nan" if r["settings"].get("disturb") else "iid"): r["results"]["accuracy"]
        for r in read_records(tmp_path / "stress" / FILE)
    }
    for method in test["methods"]:
        for scenario, spot in method["scenarios"].items():
            assert spot["mean"] == accuracy[method["method"], scenario]
    gaps = {s: accuracy["tent", s] - accuracy["source", s] for s in ("iid", "nan")}
    assert {s: spot["difference"] for s, spot in test["methods"][1]["scenarios"].items()} == gaps
    assert test["methods"][1]["worst"] == min(gaps, key=gaps.__getitem__)


def test_runs_that_failed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"dataset": "d", "target": "t", "network": "n", "method": "wrong", "seed": 1, "stream": "mixed"}
    failed = SweepSummary([], [{"id": "x", "settings": settings | {"batch": 8}, "error": "not today"}])
    monkeypatch.setattr(stress, "run_stress", lambda *_, **__: (failed, [], {}))
    found = parsed(*WORDS, status=1)
    named = {"dataset": "d", "target": "t", "network": "n", "method": "wrong", "seed": 1}
    assert found == {
        "ok": False, "records": 0, "tests": [], "failures": [named | {"scenario": "mixed", "error": "not today"}],
        "files": [], "left_out": [],
    }  # fmt: skip


def test_numbers_that_json_does_not_know_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    options.print_json({"a": float("nan"), "b": [1.5, float("inf")]})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None]}
