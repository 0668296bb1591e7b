"""Jobs: the record of a run, its runner, and the record of a failure."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_jobs import reproducible_part, run_of, stored, toy
from toy_streams import tensor

import trueup
from trueup.bench.jobs import Paths, evaluate, failure_record, make_runner, source_images
from trueup.bench.settings import Run
from trueup.bench.stream_runner import make_stream
from trueup.data.loading import ConcatDomains
from trueup.source.checkpoints import Store
from trueup.source.recipe import Training
from trueup.source.tasks import split_holdout

# Records


def record_of(folder: Path, run: Run) -> dict[str, Any]:
    dataset = toy()
    runner = make_runner(run, dataset, stored(folder, run, dataset), Paths(folder))
    return evaluate(run, runner, dataset, lambda done, of: None, Paths(Path()))


@pytest.mark.parametrize("method", ["source", "t3a", "tsd", "eata"])
def test_two_runs_of_one_seed_have_the_same_record_but_for_time(tmp_path: Path, method: str) -> None:
    first, again = (record_of(tmp_path / name, run_of(method)) for name in ("one", "two"))
    assert reproducible_part(first) == reproducible_part(again)
    other = record_of(tmp_path / "one", run_of(method, seed=1))
    assert other["id"] != first["id"]
    assert other["results"] != first["results"]


def test_record_is_one_line_of_json_with_every_knob(tmp_path: Path) -> None:
    run = run_of()
    record = record_of(tmp_path, run)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert list(record) == ["id", "settings", "results", "cost", "environment", "finished"]
    assert Run(**record["settings"]) == run
    assert record["id"] == run.digest()
    assert {"accuracy", "macro", "per_class", "ece", "nll", "images", "updates", "broken"} <= set(record["results"])
    assert {"trueup", "torch", "python", "numpy", "threads", "cpu"} <= set(record["environment"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["finished"])


def test_runner_has_the_targets_images_in_the_runs_order(tmp_path: Path) -> None:
    run, dataset = run_of(limit=20, target="d1+d3", stream="mixed", reset=True), toy()
    runner = make_runner(run, dataset, stored(tmp_path, run, dataset), Paths(tmp_path))
    expected = make_stream(
        ConcatDomains([dataset.domain("d1"), dataset.domain("d3")]), "mixed", {}, seed=0, batch=16, limit=20, reset=True
    )
    assert [b.tolist() for b in runner.stream] == [b.tolist() for b in expected]
    assert (runner.reset, runner.seed) == (True, 0)


def test_source_images_are_training_images_of_the_source_domains_alone() -> None:
    run, dataset = run_of(), toy()
    found = torch.cat(list(source_images(run, dataset)))
    d1, d2 = dataset.domain("d1"), dataset.domain("d2")
    known = tensor(ConcatDomains([d1, d2]), np.arange(120))
    matches = (found[:, None] == known[None]).flatten(2).all(dim=2)
    assert bool((matches.sum(dim=1) == 1).all())
    trains = [split_holdout(d, Training().holdout, run.seed)[0] for d in (d1, d2)]
    assert sorted(matches.int().argmax(dim=1).tolist()) == [*trains[0], *(trains[1] + 60)]


# Failures


def raised(path: str) -> Exception:
    def inner(values: dict[str, int]) -> int:
        return values[path] + 1

    def outer(values: dict[str, int]) -> int:
        return inner(values)

    try:
        outer({})
    except KeyError as error:
        return error
    raise AssertionError


def test_failure_names_the_error_and_its_run() -> None:
    record = failure_record(run_of(), raised("accuracy"))
    assert record["error"] == "KeyError: 'accuracy'"
    assert (record["id"], record["settings"]) == (run_of().digest(), run_of().model_dump(mode="json"))
    assert "results" not in record
    json.dumps(record)


def test_failure_names_the_place_in_the_code() -> None:
    assert "values[path] + 1" in " ".join(failure_record(run_of(), raised("x"))["at"])


def test_failure_of_a_single_frame_names_the_place_alone() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        record = failure_record(run_of(), error)
    assert 'raise ValueError("no")' in " ".join(record["at"])
    assert not any("Traceback" in line for line in record["at"])


def test_failure_in_words_has_no_place() -> None:
    assert failure_record(run_of(), "its process was killed")["error"] == "its process was killed"
    assert failure_record(run_of(), "its process was killed")["at"] == []


def test_failure_does_not_tell_where_things_are(tmp_path: Path) -> None:
    try:
        make_runner(run_of(), toy(), Store(tmp_path), Paths(tmp_path))
    except (ValueError, OSError) as error:
        text = json.dumps(failure_record(run_of(), error))
    assert str(tmp_path) not in text
    assert str(Path(trueup.__file__).parent) not in text
