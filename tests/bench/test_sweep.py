"""Sweeps: nothing is repeated, nothing is lost, and one failure is one failure."""

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from toy_jobs import reproducible_part, run_sweep

import trueup.core.registry as registry
from trueup.bench.records import FILE, read_records
from trueup.bench.settings import make_sweep
from trueup.bench.sweep import Plan, plan, run, sort_records
from trueup.data.pictures import UnknownRangeError
from trueup.report.groups import Traces
from trueup.source.checkpoints import Store
from trueup.source.recipe import Recipe, Training

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "target": ["type", "neon"],
    "seed": [0],
    "method": ["source", "tent", "t3a", "tsd"],
    "limit": 256,
    "training": {"iterations": 8, "batch": 8, "first": 4, "every": 4},
}

PROGRAM = """
import json, sys
from trueup.bench.settings import make_sweep
from trueup.bench.sweep import plan, run_plan
if __name__ == "__main__":
    run_plan(plan(make_sweep(json.loads(sys.argv[1])), sys.argv[2]), workers=2)
"""


def start(settings: dict[str, Any], folder: Path) -> "subprocess.Popen[bytes]":
    script = folder.parent / "sweep_it.py"
    script.write_text(PROGRAM)
    return subprocess.Popen([sys.executable, str(script), json.dumps(settings), str(folder)])


def by_id(folder: Path) -> dict[str, Any]:
    return {record["id"]: reproducible_part(record) for record in read_records(folder)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, warm_sweeps: None) -> Path:
    """An undisturbed sweep, two processes at a time."""
    folder = tmp_path_factory.mktemp("whole") / "runs"
    summary = run_sweep(make_sweep(SMALL), folder, workers=2)
    assert not summary.failures
    return folder


@pytest.mark.slow
def test_every_run_has_one_record_with_every_knob(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / FILE).read_text().splitlines()]
    runs = make_sweep(SMALL).runs()
    assert sorted(line["id"] for line in lines) == sorted(run.digest() for run in runs)
    for line in lines:
        assert line["settings"]["hyper"].keys() >= {"norm", "episodic"}
        assert line["settings"]["source"]["iterations"] == 8
        assert line["environment"]["threads"] >= 1
        assert line["results"]["images"] == 256
        assert line["cost"]["seconds"] > 0
        assert line["cost"]["peak_memory_mb"] > 0
    assert str(Path.home()) not in (whole / FILE).read_text()


@pytest.mark.slow
def test_every_run_of_a_sweep_leaves_a_trace(whole: Path) -> None:
    read = Traces(whole)
    images: dict[str, list[Any]] = {}
    for record in read_records(whole):
        trace = read(record)
        assert trace is not None
        assert record["trace"] == f"traces/{record['id']}.npz"
        assert (trace["label"] == trace["prediction"]).mean() == pytest.approx(record["results"]["accuracy"])
        assert len(trace["sample"]) == len(trace["features"]) == 256
        assert record["results"]["along"]["images"][-1] == 256
        images.setdefault(record["settings"]["target"], []).append(trace["image"].tolist())
    for same in images.values():  # all methods see the same images
        assert same == same[:1] * 4


@pytest.mark.slow
def test_finished_runs_are_not_run_again(whole: Path) -> None:
    before, models = (whole / FILE).read_bytes(), sorted((whole / "checkpoints").iterdir())
    stamps = [model.stat().st_mtime_ns for model in models]
    events: list[str] = []
    summary = run_sweep(make_sweep(SMALL), whole, workers=2, on_event=lambda event, job, value: events.append(event))
    assert events == []
    assert len(summary.records) == 8
    assert (whole / FILE).read_bytes() == before
    assert [model.stat().st_mtime_ns for model in models] == stamps


@pytest.mark.slow
def test_one_process_and_two_give_the_same_records(whole: Path, tmp_path: Path) -> None:
    """As long as each process has as many threads."""
    record = next(r for r in read_records(whole) if r["settings"]["method"] == "tsd")
    again = run(tmp_path, dataset="digits", target=record["settings"]["target"], method="tsd", limit=256,
                training=SMALL["training"])  # fmt: skip
    assert reproducible_part(again) == reproducible_part(record) | {"environment": again["environment"]}
    assert again["environment"]["threads"] == record["environment"]["threads"]


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_to_the_same_records(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    process = start(SMALL, folder)
    while process.poll() is None and (not (folder / FILE).exists() or (folder / FILE).read_bytes().count(b"\n") < 2):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = len(by_id(folder))
    assert 2 <= found < 8, "killed too early or too late to mean anything"
    with (folder / FILE).open("ab") as file:
        file.write(b'{"id": "cut sho')  # as a kill in the middle of a write would leave it
    assert not run_sweep(make_sweep(SMALL), folder, workers=2).failures
    assert by_id(folder) == by_id(whole)
    assert (folder / FILE).read_bytes().count(b'"results"') == 8, "a finished run was run again"


@pytest.mark.slow
def test_a_failing_run_is_named_and_the_others_go_on(whole: Path, tmp_path: Path) -> None:
    settings = {**SMALL, "target": ["type"], "method": ["source", {"tent": {"params": "nothing_is_called_so"}}, "bn"]}
    summary = run_sweep(make_sweep(settings), tmp_path, workers=1, checkpoints=whole / "checkpoints")
    assert [r["settings"]["method"] for r in summary.records] == ["source", "bn"]
    (failed,) = summary.failures
    assert failed["settings"]["method"] == "tent"
    assert "nothing_is_called_so" in failed["error"]
    again = run_sweep(make_sweep(settings), tmp_path, workers=1, checkpoints=whole / "checkpoints")
    assert len(again.records) == 2, "finished runs count"
    assert len(again.failures) == 1, "a failed run is tried again"


FATAL = """
import os, sys
from dataclasses import dataclass
from trueup.core.method import Info, Method
from trueup.core.registry import register

@register
@dataclass(frozen=True, kw_only=True)
class Fatal(Method):
    info = Info(name="fatal", title="Dies", paper="none")
    def predict(self, net, out, state):
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_process_that_dies_takes_only_its_own_runs(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fatal_method.py").write_text(FATAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    settings = {**SMALL, "plugin": "fatal_method", "method": ["source", "fatal", "bn"]}
    summary = run_sweep(make_sweep(settings), tmp_path / "runs", workers=2, checkpoints=whole / "checkpoints")
    assert sorted(r["settings"]["method"] for r in summary.records) == ["source", "source"]
    assert sorted(r["settings"]["method"] for r in summary.failures) == ["bn", "bn", "fatal", "fatal"]
    assert all("-9" in r["error"] for r in summary.failures)


@pytest.mark.slow
def test_a_training_that_fails_is_named_in_its_runs_alone(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_such.py").write_text("def net(classes):\n    raise ValueError('no_such network today')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {
        **SMALL,
        "target": ["type"],
        "method": ["source", "bn"],
        "network": ["digits-net", "no_such:net"],
    }
    summary = run_sweep(make_sweep(settings), tmp_path, workers=1, checkpoints=whole / "checkpoints")
    assert {r["settings"]["network"] for r in summary.records} == {"digits-net"}
    assert len(summary.failures) == 2
    assert all("training failed" in r["error"] and "no_such" in r["error"] for r in summary.failures)


def test_a_plan_groups_runs_by_runner_and_trains_each_model_once(tmp_path: Path) -> None:
    todo: Plan = plan(make_sweep({**SMALL, "batch": [16, 64]}), tmp_path)
    assert len(todo.runs) == 16
    assert len(todo.trainings) == 2
    assert sorted(len(job.runs) for job in todo.jobs) == [4, 4, 4, 4]
    assert len({(job.runs[0].target, job.runs[0].batch) for job in todo.jobs}) == 4
    assert len(todo.waiting) == 16


def test_the_first_look_reads_pictures_as_the_checkpoint_of_each_run_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pictures of 12 bits in 16, which are refused unless somebody says their range."""
    ramp = np.linspace(0, 4095, 72).astype(np.uint16).reshape(6, 12)
    for domain, label in itertools.product(("day", "night"), ("cat", "dog")):
        (tmp_path / "data" / domain / label).mkdir(parents=True)
        Image.fromarray(ramp).save(tmp_path / "data" / domain / label / "0.png")

    def save(target: str, **known: Any) -> None:
        values: dict[str, Any] = {"dataset": "elsewhere", "sources": ("dawn",), "classes": 2, "network": "digits-net"}
        recipe = Recipe(**values, training=Training(**known))
        store = Store(tmp_path / "models")
        store.save(recipe, torch.nn.Linear(1, 2), {})
        store.path(recipe).replace(tmp_path / f"{target}.safetensors")

    save("day", range=(0, 4095), resize="crop")
    save("night", range=(0, 1000), resize="crop")
    settings = {"dataset": "folder", "root": str(tmp_path / "data"), "method": ["source"], "seed": [0]}
    settings["checkpoint"] = str(tmp_path / "{target}.safetensors")
    plan(make_sweep({**settings, "target": ["day"]}), tmp_path / "runs")
    assert caplog.text == ""
    plan(make_sweep(settings), tmp_path / "runs")
    assert "have values beyond --range" in caplog.text  # by the second checkpoint
    save("day")
    with pytest.raises(UnknownRangeError, match=r"^day/cat/0\.png"):
        plan(make_sweep(settings), tmp_path / "runs")


def test_records_can_be_put_in_the_order_of_the_runs() -> None:
    runs = make_sweep(SMALL).runs()
    records = [{"id": run.digest()} for run in reversed(runs)]
    assert [r["id"] for r in sort_records(records, runs)] == [run.digest() for run in runs]


def test_one_run_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="8 runs, not one"):
        run(tmp_path, **SMALL)
