"""Hyper-parameters are searched over the paper's grids on held-out source images; the target's labels stay unseen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trueup
from trueup.bench.hparam_search import GRIDS, search_grid, search_hyper
from trueup.bench.jobs import Paths, evaluate, holdout_runners
from trueup.bench.settings import Run
from trueup.bench.stream_runner import StreamResult, StreamRunner, make_stream
from trueup.core.method import Method
from trueup.core.registry import make_method
from trueup.data.datasets import Dataset
from trueup.data.domains import ArrayDomain
from trueup.data.loading import ConcatDomains, Loader
from trueup.source.recipe import GivenModel, Training
from trueup.source.tasks import split_holdout
from trueup.testing import convnet, images

RATES = [1e-6, 1e-5, 1e-4, 1e-3]


class Scored(StreamRunner):
    """A runner that gives marks for hyper-parameters and runs nothing."""

    def __init__(self, score: Callable[[dict[str, Any]], float]) -> None:
        self.score = score
        self.asked: list[dict[str, Any]] = []

    def run(self, method: Method, *_: Any, **__: Any) -> StreamResult:
        self.asked.append(method.hyperparameters())
        return StreamResult({"accuracy": self.score(method.hyperparameters())}, {}, {})


# Grids


def test_grid_of_tsd_is_the_papers() -> None:
    assert {(c["lr"], c["per_class"]) for c in search_grid("tsd", {})} == {
        (lr, m) for lr in (1e-3, 1e-4, 1e-5, 1e-6) for m in (1, 5, 20, 50, 100, None)
    }
    assert len(search_grid("tsd", {})) == 24


def test_grid_of_t3a_is_its_size_of_the_bank() -> None:
    assert [c["per_class"] for c in search_grid("t3a", {})] == [1, 5, 20, 50, 100, None]


def test_grid_of_lame_is_affinity_and_neighbours() -> None:
    found = {(c["affinity"], c["neighbors"]) for c in search_grid("lame", {})}
    assert found == {(a, k) for a in ("knn", "rbf") for k in (1, 3, 5)} | {("linear", 1)}


@pytest.mark.parametrize("name", ["tent", "pl", "shot-im", "eta", "eata"])
def test_other_gradient_methods_search_the_papers_learning_rates(name: str) -> None:
    assert search_grid(name, {}) == [{"lr": lr} for lr in RATES]


@pytest.mark.parametrize("name", ["source", "bn", "unheard-of"])
def test_methods_with_nothing_to_search_have_no_grid(name: str) -> None:
    assert search_grid(name, {}) == []


@pytest.mark.parametrize("name", GRIDS)
def test_candidates_are_valid_different_and_come_with_rising_learning_rate(name: str) -> None:
    found = search_grid(name, {})
    assert len({tuple(c.items()) for c in found}) == len(found)
    assert [c.get("lr", 0) for c in found] == sorted(c.get("lr", 0) for c in found)
    for candidate in found:
        assert make_method(name, candidate).hyperparameters() == make_method(name, {}).hyperparameters() | candidate


def test_grids_are_of_methods_that_exist() -> None:
    assert set(GRIDS) <= set(trueup.list_methods())
    still = {"source", "bn", "bn-alpha", "bn-prior"}  # nothing to choose
    assert set(trueup.list_methods()) - still <= set(GRIDS)
    for name, axes in GRIDS.items():
        assert set(axes) <= set(trueup.get_method(name)().hyperparameters())


def test_given_values_leave_the_grid() -> None:
    assert search_grid("tsd", {"per_class": 7, "neighbors": 1}) == [{"lr": lr} for lr in RATES]
    assert [c["per_class"] for c in search_grid("tsd", {"lr": 0.5})] == [1, 5, 20, 50, 100, None]
    assert search_grid("tsd", {"lr": 0.5, "per_class": None}) == []


# The choice


def test_best_mean_over_runner_wins() -> None:
    first = Scored(lambda h: {1e-6: 0.5, 1e-5: 0.9, 1e-4: 0.6, 1e-3: 0.1}[h["lr"]])
    second = Scored(lambda h: {1e-6: 0.5, 1e-5: 0.1, 1e-4: 0.6, 1e-3: 0.9}[h["lr"]])
    choice = search_hyper("tent", {}, [first, second])
    assert choice["chosen"] == {"lr": 1e-4}
    means = [0.5, 0.5, 0.6, 0.5]
    assert choice["search"] == [{"lr": lr, "accuracy": pytest.approx(m)} for lr, m in zip(RATES, means, strict=True)]


@pytest.mark.parametrize("method", ["tent", "tsd", "eta"])
def test_of_equal_ones_the_smaller_learning_rate_wins(method: str) -> None:
    assert search_hyper(method, {}, [Scored(lambda h: 0.5)])["chosen"]["lr"] == 1e-6
    assert search_hyper(method, {}, [Scored(lambda h: float(h["lr"] > 2e-6))])["chosen"]["lr"] == 1e-5


def test_tie_between_sizes_of_the_bank_still_goes_to_the_smaller_learning_rate() -> None:
    best = {(1e-3, 1), (1e-5, 100)}
    choice = search_hyper("tsd", {}, [Scored(lambda h: float((h["lr"], h["per_class"]) in best))])
    assert choice["chosen"] == {"lr": 1e-5, "per_class": 100}


def test_given_values_stay_fixed_in_every_candidate() -> None:
    runner = Scored(lambda h: 0.5)
    choice = search_hyper("tsd", {"lr": 0.3, "neighbors": 1, "norm": "source"}, [runner])
    assert {(h["lr"], h["neighbors"], h["norm"]) for h in runner.asked} == {(0.3, 1, "source")}
    assert [h["per_class"] for h in runner.asked] == [1, 5, 20, 50, 100, None]
    assert set(choice["chosen"]) == {"per_class"}


def test_every_candidate_is_run_once_on_every_runner() -> None:
    grounds, ticks = [Scored(lambda h: 0.5), Scored(lambda h: 0.4)], []
    search_hyper("tsd", {}, grounds, lambda: ticks.append(1))
    assert [len(g.asked) for g in grounds] == [24, 24]
    assert len(ticks) == 48


def test_candidate_that_goes_astray_loses_and_the_search_goes_on() -> None:
    def score(hyper: dict[str, Any]) -> float:
        if hyper["lr"] == 1e-3:
            raise ValueError("the model's answer to this batch is not finite")
        return hyper["lr"]

    assert search_hyper("tent", {}, [Scored(score)])["chosen"] == {"lr": 1e-4}


# On images


def domain(name: str, n: int, *, seed: int, shift: float) -> ArrayDomain:
    x, y = images(n, seed=seed, shift=shift)
    array = (40 * x + 127.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return ArrayDomain(name, array, y.numpy())


def toy(*, poisoned: bool = False) -> Dataset:
    target = domain("c", 60, seed=3, shift=1.0)
    if poisoned:
        rng = np.random.default_rng(0)
        noise = rng.integers(256, size=target.images.shape).astype(np.uint8)
        target = ArrayDomain("c", noise, (target.labels + 1) % 6)
    domains = {"a": domain("a", 90, seed=1, shift=0.2), "b": domain("b", 120, seed=2, shift=0.6), "c": target}
    return Dataset("toy", tuple("abcdef"), ("a", "b", "c"), domains.__getitem__)


def net() -> nn.Module:
    model = convnet()
    first = model.get_submodule("conv0")
    assert isinstance(first, nn.Conv2d)
    first.weight.data *= 127.5 / 40
    return model


def run_of(method: str, select: str, **hyper: Any) -> Run:
    searched = {key for c in search_grid(method, hyper) for key in c} if select != "default" else set()
    full = make_method(method, hyper).hyperparameters()
    return Run(
        dataset="toy", target="c", network="none", weights="none", batch=16, method=method, select=select,
        source=Training(iterations=1, size=16, normalize="half", augment="none", holdout=0.4),
        hyper={key: value for key, value in full.items() if key not in searched},
    )  # fmt: skip


def runner_of(run: Run, dataset: Dataset) -> StreamRunner:
    place = ConcatDomains([dataset.domain("c")])
    stream = make_stream(place, "iid", {}, seed=run.seed, batch=run.batch, limit=None, reset=False)
    return StreamRunner(net(), Loader(place, 16, "half", keep=True), stream, run.seed)


def record_of(run: Run, dataset: Dataset) -> dict[str, Any]:
    return evaluate(run, runner_of(run, dataset), dataset, lambda done, of: None, Paths(Path()))


def test_held_out_runner_are_the_source_domains_without_training_images() -> None:
    run, dataset = run_of("tent", "source"), toy()
    runners = list(holdout_runners(run, runner_of(run, dataset), dataset))
    assert [[d.name for d in s.loader.place.domains] for s in runners] == [["a"], ["b"]]
    for runner, name in zip(runners, "ab", strict=True):
        trains, held = split_holdout(dataset.domain(name), 0.4, run.seed)
        at = np.concatenate(runner.stream)
        assert sorted(at.tolist()) == held.tolist()
        assert at.tolist() != held.tolist()  # shuffled
        assert not set(at.tolist()) & set(trains.tolist())
        assert {len(b) for b in runner.stream[:-1]} == {16}


def test_scores_are_the_online_accuracy_on_held_out_images_mean_over_domains() -> None:
    run, dataset = run_of("tent", "source"), toy()
    record = record_of(run, dataset)
    for entry in record["search"]:
        scores = []
        for name in "ab":
            source = dataset.domain(name)
            assert isinstance(source, ArrayDomain)
            _, held = split_holdout(source, 0.4, run.seed)
            order = np.random.default_rng(run.seed).permutation(held)
            adapter, right = trueup.adapt(net(), "tent", lr=entry["lr"]), 0
            for start in range(0, len(order), 16):
                at = order[start : start + 16]
                x = torch.from_numpy(source.images[at]).permute(0, 3, 1, 2).float().sub(127.5).div(127.5)
                right += int((adapter(x).argmax(dim=1).numpy() == source.labels[at]).sum())
            scores.append(right / len(order))
        assert entry["accuracy"] == pytest.approx(sum(scores) / 2)


@pytest.mark.parametrize("method", ["tsd", "t3a", "lame", "tent"])
def test_source_search_does_not_depend_on_the_target(method: str) -> None:
    run = run_of(method, "source", **({"per_class": 5} if method == "tsd" else {}))  # a smaller grid
    first, second = (record_of(run, toy(poisoned=poisoned)) for poisoned in (False, True))
    assert first["chosen"] == second["chosen"]
    assert first["search"] == second["search"]
    assert first["results"] != second["results"]


def test_source_search_opens_no_target() -> None:
    run, dataset = run_of("tsd", "source"), toy()
    opened: list[str] = []

    def watched(name: str) -> Any:
        opened.append(name)
        return dataset.open(name)

    guarded = Dataset("toy", dataset.classes, dataset.targets, watched)
    list(holdout_runners(run, runner_of(run, dataset), guarded))
    assert opened == ["a", "b"]


def test_oracle_search_uses_the_targets_labels() -> None:
    run = run_of("t3a", "oracle")
    first, second = (record_of(run, toy(poisoned=poisoned)) for poisoned in (False, True))
    assert first["search"] != second["search"]
    assert first["settings"]["select"] == "oracle"
    best = max(entry["accuracy"] for entry in first["search"])
    assert first["results"]["accuracy"] == best


@pytest.mark.parametrize("select", ["source", "oracle"])
def test_chosen_values_and_all_scores_are_recorded(select: str) -> None:
    dataset = toy()
    record = record_of(run_of("tsd", select, per_class=5, norm="source"), dataset)
    assert [entry["lr"] for entry in record["search"]] == RATES
    best = max(record["search"], key=lambda entry: (entry["accuracy"], -entry["lr"]))
    assert record["chosen"] == {"lr": best["lr"]}
    assert "lr" not in record["settings"]["hyper"]
    assert record["settings"]["hyper"]["per_class"] == 5
    plain = record_of(run_of("tsd", "default", per_class=5, norm="source", lr=best["lr"]), dataset)
    assert record["results"] == plain["results"]


def test_run_without_a_search_records_none() -> None:
    record = record_of(run_of("tsd", "default"), toy())
    assert "chosen" not in record
    assert "search" not in record


@pytest.mark.parametrize(
    "source", [GivenModel(checkpoint="sha256:0", size=16, normalize="half"), Training(iterations=0)]
)
def test_model_that_was_trained_elsewhere_has_nothing_held_out(source: Training | GivenModel) -> None:
    run = run_of("tent", "source").model_copy(update={"source": source})
    with pytest.raises(ValueError, match="needs images that training held out"):
        record_of(run, toy())
