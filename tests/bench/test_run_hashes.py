"""What makes two runs the same run."""

from typing import Any

import pytest
from toy_settings import GREY, GUARDED, one, runs

from trueup.bench.settings import PAPER_METHODS, Run
from trueup.core.registry import get_method
from trueup.source.recipe import GivenModel, Training


def test_id_of_a_run_never_changes() -> None:
    assert one().digest() == "68b1644e43b19a59"
    assert one(training={"multilabel": False}).digest() == "68b1644e43b19a59"
    assert "multilabel" not in one().model_dump(mode="json")["source"]
    assert not {"guard", "repeat", "disturb"} & set(one(repeat=1, disturb="").model_dump(mode="json"))
    assert one(repeat=1, disturb="", method="tsd:guard=false").digest() == "68b1644e43b19a59"


def test_id_changes_with_every_setting() -> None:
    run, given = one(), GivenModel(checkpoint="sha256:0")
    others: dict[str, Any] = {
        "dataset": "x", "data": "x", "target": "x", "network": "x", "weights": "x", "source": given, "method": "x",
        "code": {"method": "x"}, "hyper": run.hyper | {"lr": 1e-3}, "seed": 1, "stream": "mixed",
        "stream_options": {"slots": 1}, "batch": 1, "limit": 1, "reset": True, "select": "source",
        "guard": True, "repeat": 2, "disturb": "nan",
    }  # fmt: skip
    assert set(others) == set(Run.model_fields)
    found = {run.model_copy(update={name: value}).digest() for name, value in others.items()}
    assert len(found | {run.digest()}) == len(others) + 1


def test_id_changes_with_every_setting_of_training() -> None:
    run = one()
    assert isinstance(run.source, Training)
    others: dict[str, Any] = {
        "algorithm": "swad", "iterations": 1, "batch": 1, "lr": 1.0, "optimizer": "sgd", "weight_decay": 1.0,
        "decay_at": (0.5,), "augment": "shift", "normalize": "imagenet", "size": 8, "holdout": 0.5, "every": 1,
        "first": 1, "converge": 1, "tolerate": 1, "tolerance": 1.0, "refresh": 1,
        "multilabel": True, "resize": "crop", "range": (0, 4095), "grey": True,
    }  # fmt: skip
    assert set(others) == set(Training.model_fields)
    found = {
        run.model_copy(update={"source": run.source.model_copy(update={name: value})}).digest()
        for name, value in others.items()
    }
    assert len(found | {run.digest()}) == len(others) + 1


@pytest.mark.parametrize("values", [{}, {"select": "source"}, {"training": {"decay_at": [0.5, 0.75]}}, GREY, GUARDED])
def test_run_comes_back_from_its_record(values: dict[str, Any]) -> None:
    run = one(**values)
    assert Run(**run.model_dump(mode="json")) == run
    assert Run(**run.model_dump(mode="json")).digest() == run.digest()


@pytest.mark.parametrize("method", PAPER_METHODS)
def test_all_hyper_parameters_are_in_the_settings(method: str) -> None:
    usual = {"search": "exact"} if method == "tsd" else {}  # said only where it is not so
    assert one(method=method).hyper | usual == get_method(method)().hyperparameters()
    assert {"norm", "episodic"} <= set(one(method=method).hyper)


def test_a_hyper_parameter_that_came_later_leaves_older_runs_their_names() -> None:
    assert "search" not in one(method="tsd:search=exact").hyper
    assert one(method="tsd:search=sketch").hyper == one().hyper | {"search": "sketch"}
    assert one(method="tsd:search=sketch").digest() != one(method="tsd:search=exact").digest() == one().digest()


@pytest.mark.parametrize("method", [*PAPER_METHODS, "eata"])
def test_default_that_is_given_is_the_same_run(method: str) -> None:
    for name, value in get_method(method)().hyperparameters().items():
        assert one(method={method: {name: value}}).digest() == one(method=method).digest()


@pytest.mark.parametrize(
    ("method", "hyper"),
    [("eata", {"fisher_weight": 2000}), ("tsd", {"variant": "released", "alignment": 0}), ("eta", {"momentum": "1"})],
)
def test_whole_number_for_a_fraction_is_the_same_run(method: str, hyper: dict[str, Any]) -> None:
    as_fraction = {key: value if key == "variant" else float(value) for key, value in hyper.items()}
    assert one(method={method: hyper}).digest() == one(method={method: as_fraction}).digest()


def test_both_modes_of_statistics_are_runs_of_their_own() -> None:
    found = runs(target="hand", seed=0, method=[{m: {"norm": n}} for m in ("tsd", "lame") for n in ("source", "batch")])
    assert [(run.method, run.hyper["norm"]) for run in found] == [
        ("tsd", "source"), ("tsd", "batch"), ("lame", "source"), ("lame", "batch"),
    ]  # fmt: skip
